"""Both ends of ships on loopback, each with a pool of blocks, a ledger, and an engine that plays by the contract."""

from __future__ import annotations

import itertools

import numpy as np

from kvferry.engine.block_interfaces import GRANT, QUIESCE, REQUEST, SHIP
from kvferry.engine.ledger import Ledger
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.ports import BlockMemory, ShipStats
from kvferry.kv_transfer.receiver import Receiver
from kvferry.kv_transfer.sender import Sender
from kvferry.protocol.errors import GrantRefused
from kvferry.protocol.messages import DecodeTarget, Job, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.kv_transfer.fault_injection import Faults, FaultyLink
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.later_checksums import LaterChecksums

BLOCK_SIZE = 16
BLOCK_BYTES = 64
FINGERPRINT = "f" * 32
EPOCH = 7


def job(blocks: int, request_id: str = "r", deadline_s: float = 60.0) -> Job:
    tokens = tuple(range(blocks * BLOCK_SIZE))
    return Job(request_id, 1, tokens, len(tokens), Generate(SamplingParams()), "router", deadline_s=deadline_s)


def delta(token: int = 5) -> TokenDelta:
    return TokenDelta("r", 1, 0, (token,))


class Pool(BlockMemory):
    """A BlockMemory whose free blocks carry a canary: nobody may write to a block without a hold."""

    CANARY = 0x5A

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES):
        self.memory = np.full((num_blocks, block_bytes), self.CANARY, dtype=np.uint8)
        self.ledger = Ledger(num_blocks)
        self.free = list(range(num_blocks))

    def block(self, block_id: int) -> np.ndarray:
        return self.memory[block_id]

    def id_of(self, buffer: np.ndarray) -> int:
        """The block that a view from `block` shows."""
        return (buffer.ctypes.data - self.memory.ctypes.data) // self.memory.shape[1]

    def take(self, owner, reason, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.pop(0) for _ in range(count)]
        self.ledger.hold(owner, reason, taken)
        return taken

    def give(self, owner, reason) -> None:
        freed = self.ledger.release(owner, reason)
        self.memory[freed] = self.CANARY
        self.free += freed

    def check(self) -> None:
        self.ledger.check_integrity()
        assert len(self.free) + self.ledger.num_held == self.ledger.num_blocks
        for block_id in self.free:
            assert (self.memory[block_id] == self.CANARY).all(), f"free block {block_id} was written to"


class Lending(Pool):
    """Whose blocks leave from rows that are lent, and land in them. Those given back carry a mark of the pool's
    own: a checksum that still looks at one is not what the other side has."""

    marks = itertools.count(1)

    def __init__(self, *size: int):
        super().__init__(*size)
        self.mark = next(self.marks) % 256
        self.transfer_holds: dict[int, int] = {}
        """The block for which a row was lent, by its address."""
        self.spare: list[np.ndarray] = []

    def id_of(self, buffer: np.ndarray) -> int:
        return self.transfer_holds[buffer.ctypes.data]

    def to_fill(self, block_id: int) -> np.ndarray:
        row = self.spare.pop(0) if self.spare else np.empty_like(self.memory[0])
        self.transfer_holds[row.ctypes.data] = block_id
        return row

    def to_send(self, block_id: int) -> np.ndarray:
        row = self.to_fill(block_id)
        row[:] = self.memory[block_id]
        return row

    def landed(self, block_id: int, buffer: np.ndarray) -> None:
        assert self.id_of(buffer) == block_id
        self.memory[block_id] = buffer

    def give_back(self, buffer: np.ndarray) -> None:
        del self.transfer_holds[buffer.ctypes.data]
        buffer[:] = self.mark
        self.spare.append(buffer)

    def check(self) -> None:
        super().check()
        assert all((row == self.mark).all() for row in self.spare), "a row that was given back was written to"


class Watched:
    """Wraps the loopback link of a side: `posted` are the blocks its operations may still touch."""

    def __init__(self, link, pool: Pool):
        self._pool = pool
        self._by_peer: dict[object, list[int]] = {}
        self._disconnect = link.disconnect
        link.send_block = self._watch(link.send_block)
        link.receive_block = self._watch(link.receive_block)
        link.disconnect = self.disconnect

    @property
    def posted(self) -> list[int]:
        return [block_id for ids in self._by_peer.values() for block_id in ids]

    def _watch(self, post):
        def call(peer, tag, buffer, done):
            ids = self._by_peer.setdefault(peer, [])
            block_id = None if isinstance(buffer, bytes) else self._pool.id_of(buffer)

            def ended(error):
                if error is None and block_id in ids:
                    ids.remove(block_id)
                done(error)

            if block_id is not None:
                ids.append(block_id)
            post(peer, tag, buffer, ended)

        return call

    def disconnect(self, peer, quiet):
        def closed():
            self._by_peer.pop(peer, None)
            quiet()

        self._disconnect(peer, closed)


class Process:
    """One process's link, pool and dock; `options` are taken out of a side's."""

    def __init__(self, network: LoopbackNetwork, address: str, faults: Faults | None, blocks: int, options: dict):
        self.inner = network.link(address)
        self.link = FaultyLink(self.inner, faults) if faults else self.inner
        kind = options.pop("pool", Pool)
        self.pool = kind(options.pop("blocks", blocks), options.pop("block_bytes", BLOCK_BYTES))
        self.watched = Watched(self.inner, self.pool)
        own = {name: options.pop(name) for name in ("verify", "window") if name in options}
        checksums = LaterChecksums(self.link.submit)
        self.dock = Dock(self.link, self.pool, checksums=checksums, clock=network.clock, **own)


class Side:
    """An engine in a process of its own, or in one that mounts others beside it and starts their dock."""

    def __init__(self, process: Process):
        self.process, self.inner, self.link = process, process.inner, process.link
        self.pool, self.watched, self.dock = process.pool, process.watched, process.dock


class PrefillSide(Side):
    """The prefill engine: holds a ship's blocks from offer to quiet; `log` keeps the events of each transfer."""

    def __init__(self, network, address="", faults: Faults | None = None, *, beside: Process | None = None, **options):
        super().__init__(beside or Process(network, address, faults, 64, options))
        self.sender = Sender(self.dock, self, **options)
        if beside is None:
            self.dock.start()
        self.log: dict[int, list[str]] = {}
        self.errors: dict[int, Exception] = {}
        self.stats: dict[int, ShipStats] = {}
        self.first: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self._stamp = itertools.count()

    def offer(self, target: DecodeTarget, blocks: int, **job_options) -> int | None:
        """Offer a ship of freshly computed blocks; None when the pool is full."""
        key = f"compute{next(self._stamp)}"
        ids = self.pool.take(key, REQUEST, blocks)
        if ids is None:
            return None
        transfer = self.sender.offer(target, job(blocks, **job_options))
        self.pool.ledger.hold(transfer, SHIP, ids)
        self.pool.ledger.release(key, REQUEST)
        self.log[transfer], self.blocks[transfer] = [], ids
        for index, block_id in enumerate(ids):
            self.pool.memory[block_id] = content(transfer, index)
        return transfer

    def ship(self, transfer: int, first: int, last: int) -> None:
        self.sender.ship(transfer, list(enumerate(self.blocks[transfer]))[first:last])

    def granted(self, transfer, first_block):
        self.log[transfer].append("granted")
        self.first[transfer] = first_block

    def sent(self, transfer):
        assert self.log[transfer] == ["granted"], self.log[transfer]

    def done(self, transfer, stats):
        self.log[transfer].append("done")
        self.stats[transfer] = stats

    def failed(self, transfer, error):
        self.log[transfer].append("failed")
        self.errors[transfer] = error

    def quiet(self, transfer):
        self.log[transfer].append("quiet")
        self.pool.give(transfer, SHIP)


class DecodeSide(Side):
    """The decode engine: reserves at once (or when `answer` is called, with auto=False), runs what is ready."""

    def __init__(self, network, address="", faults: Faults | None = None, *, beside: Process | None = None, **options):
        super().__init__(beside or Process(network, address, faults, 48, options))
        self.receiver = Receiver(self.dock, self, EPOCH, FINGERPRINT, **options)
        if beside is None:
            self.dock.start()
        self.auto = True
        self.cached = 0
        self.log: dict[tuple, list[str]] = {}
        self.errors: dict[tuple, Exception] = {}
        self.commits: dict[tuple, object] = {}
        self.granted_ids: dict[tuple, list[int]] = {}
        self.asked: list[tuple] = []
        self.jobs: dict[tuple, Job] = {}

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("d", EPOCH, self.link.address, FINGERPRINT)

    def reserve(self, key, job):
        assert key not in self.log, "reserved twice"
        self.log[key], self.jobs[key] = ["reserve"], job
        self.asked.append(key)
        if self.auto:
            self.answer(key)

    def answer(self, key) -> None:
        self.asked.remove(key)
        total = len(self.jobs[key].token_ids) // BLOCK_SIZE
        first = min(self.cached, total)
        ids = self.pool.take(key, GRANT, total - first)
        if ids is None:
            self.log[key].append("refused")
            self.receiver.refused(key, GrantRefused("pool is full"))
            return
        if "failed" in self.log[key]:
            self.pool.ledger.move(key, GRANT, QUIESCE)
        self.granted_ids[key] = ids
        self.receiver.granted(key, first, ids)

    def ready(self, key, commit):
        self.log[key].append("ready")
        self.commits[key] = commit
        self.pool.ledger.move(key, GRANT, REQUEST)
        first = len(self.jobs[key].token_ids) // BLOCK_SIZE - len(self.granted_ids[key])
        for index, block_id in enumerate(self.granted_ids[key], first):
            assert (self.pool.memory[block_id] == content(key[1], index)).all(), (key, index)

    def failed(self, key, error):
        self.log[key].append("failed")
        self.errors[key] = error
        self.pool.ledger.move(key, GRANT, QUIESCE)

    def quiet(self, key):
        self.log[key].append("quiet")
        self.pool.give(key, QUIESCE)

    def finish(self, key) -> None:
        """The request is done generating."""
        self.pool.give(key, REQUEST)


class BothSides:
    """A process that both ships and receives, on one dock."""

    def __init__(self, network: LoopbackNetwork, address: str, faults: Faults | None = None):
        self.process = Process(network, address, faults, 96, {})
        self.prefill = PrefillSide(network, beside=self.process)
        self.decode = DecodeSide(network, beside=self.process)
        self.dock = self.process.dock
        self.dock.start()

    def check_nothing_left(self) -> None:
        self.process.pool.check()
        assert self.process.pool.ledger.num_held == 0
        assert not self.prefill.sender.transfers
        assert not self.decode.receiver.transfers


def content(transfer: int, index: int) -> int:
    """The byte that fills a prompt block; never the canary, the filler or the late byte."""
    return 1 + (transfer * 31 + index * 7) % 80


def check_moves(moves: dict, live: frozenset, failed) -> None:
    """Every state reaches an end, and the live ones alone may fail."""
    ends = {state for state, nexts in moves.items() if not nexts}
    for state in moves:
        reached, todo = set(), {state}
        while todo:
            reached |= todo
            todo = {n for s in todo for n in moves[s]} - reached
        assert reached & ends, state
    assert {s for s in moves if failed in moves[s]} == live
