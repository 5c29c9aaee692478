"""Tiers: host and disk KV tiers of a simulated node: the real catalog with modelled read times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.kv_transfer.tiers.catalog import Catalog
from kvferry.protocol.labels import OWN_TIERS
from kvferry.simulate.clock import Clock
from kvferry.simulate.machine import Machine
from kvferry.simulate.memory import COPY_KEPT, Memory
from kvferry.simulate.trace_request import Run

GROUP = 64
"""Maximum number of blocks of a chain that are written together (kv_transfer/tiers/files.py)."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Group of blocks in a tier.

    Implements `kv_transfer.tiers.catalog.Group`; size is in blocks."""

    name: str
    parent: bytes
    hashes: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return len(self.hashes)


class Tier:
    """Tier of a fixed number of blocks: reads run one after the other, block_s per block; writes take no time."""

    def __init__(self, name: str, blocks: int, block_s: float) -> None:
        self.name, self.block_s = name, block_s
        self._room, self._free_s, self._names = blocks, 0.0, itertools.count()
        self._catalog: Catalog[Group] = Catalog()
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def run(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are here."""
        return next((index for index, each in enumerate(hashes) if each not in self._catalog), len(hashes))

    def write(self, hashes: Sequence[bytes]) -> None:
        """Store the blocks of a chain that are missing, after those that are here; evict the oldest groups."""
        here = self.run(hashes)
        if here and (last := self._catalog.find(hashes[here - 1])):
            self._catalog.touch(last)
        for at in range(here, len(hashes), GROUP):
            group = Group(str(next(self._names)), hashes[at - 1] if at else b"", tuple(hashes[at : at + GROUP]))
            self._change(*self._catalog.enter(group))
        while self._catalog.used > self._room and (oldest := self._catalog.oldest()):
            self._change((), self._catalog.leave(oldest))

    def read_s(self, blocks: int, now: float) -> float:
        """Return the seconds until `blocks` blocks are read, after reads in progress."""
        return max(0.0, self._free_s - now) + blocks * self.block_s

    def read(self, hashes: Sequence[bytes], blocks: int, now: float) -> None:
        """Read the last `blocks` of a chain, which must be here."""
        self._free_s = now + self.read_s(blocks, now)
        if last := self._catalog.find(hashes[-1]):
            self._catalog.touch(last)

    def restart(self) -> None:
        """Report all blocks as stored again, after a restart of the node."""
        self._free_s, self._removed = 0.0, {}
        self._stored = dict.fromkeys(self._catalog.rows())

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the (stored, removed) index rows since the last call."""
        changes = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return changes

    def _change(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for each in stored:
            self._removed.pop(each, None)
            self._stored[each] = None
        for each in removed:
            if self._stored.pop(each, self) is self:
                self._removed[each] = None


class Tiers:
    """Tiers of one simulated node (worker/tiers.py).

    New blocks are written to all tiers. A prompt is read from the fastest tier that has its next block, if that is
    faster than computing.

    reading: runs whose prompts are being read."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.machine, self.clock = machine, clock
        self.reading: dict[Run, int] = {}
        self._reads = itertools.count()
        self._tiers = self._made()

    def __iter__(self) -> Iterator[Tier]:
        """Iterate over the tiers, fastest first."""
        return iter(self._tiers)

    def write(self, hashes: Sequence[bytes]) -> None:
        """Write a chain to all tiers."""
        for tier in self._tiers:
            tier.write(hashes)

    def bring(self, run: Run, memory: Memory, has_blocks: bool, done: Callable[[], None]) -> None:
        """Read the prompt's blocks into the pool, then call `done`.

        It is called at once if no read pays or the pool has no free blocks. has_blocks: the run already has blocks in
        the pool, into which they are read."""
        if not self._tiers:
            done()
            return
        size = self.machine.block_size
        hashes = run.ask.hashes[: (run.length - 1) // size]
        here = memory.found(hashes)
        for tier in self._tiers:
            upto = here + tier.run(hashes[here:])
            seconds = tier.read_s(upto - here, self.clock.now)
            if upto > here and seconds < (upto - here) * size / self.machine.prefill_tokens_per_s:
                break
        else:
            done()
            return
        owner = run if has_blocks else ("read", run)
        if not has_blocks and memory.take(owner, hashes[:upto], upto, keep=memory.num_blocks // COPY_KEPT) is None:
            done()
            return
        tier.read(hashes[:upto], upto - here, self.clock.now)
        self.reading[run] = read = next(self._reads)

        def came() -> None:
            if self.reading.get(run) == read:
                del self.reading[run]
                memory.fill(owner, hashes[:upto])
                if not has_blocks:
                    memory.release_owner(owner)
                self.write(hashes[:upto])
                self.bring(run, memory, has_blocks, done)

        self.clock.soon(seconds, came)

    def drop(self, run: Run, memory: Memory) -> None:
        """Cancel a run's read."""
        if self.reading.pop(run, None) is not None:
            memory.release_owner(("read", run))

    def die(self) -> None:
        """Lose the host tier; the disk tier stays for the next process."""
        self.reading.clear()
        kept = {tier.name: tier for tier in self._tiers if tier.name == OWN_TIERS[1]}
        self._tiers = [kept.get(tier.name, tier) for tier in self._made()]
        for tier in kept.values():
            tier.restart()

    def _made(self) -> list[Tier]:
        machine = self.machine
        sizes = (machine.host_blocks, machine.host_block_s), (machine.disk_blocks, machine.disk_block_s)
        return [Tier(name, *each) for name, each in zip(OWN_TIERS, sizes, strict=True) if each[0]]
