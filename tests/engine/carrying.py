"""Blocks carried between two engines as nodes carry them: a prompt's ship, a stream's move, a copy."""

from __future__ import annotations

from kvferry.engine.engine import Engine
from kvferry.engine.events import Computed, Generated, Reserved
from kvferry.engine.migration import OutboundMigration, Snapshot
from kvferry.protocol.messages import DecodeTarget, Job
from tests.toy import FINGERPRINT, runner_of


def granted(engine: Engine, job: Job, grant: str = "g") -> Reserved:
    engine.reserve(grant, job)
    engine.stepper.admit_grants()
    return next(e for e in engine.events if isinstance(e, Reserved) and e.owner == grant)


class Ship:
    """A prompt on its way from one engine to another, block by block as they are announced."""

    def __init__(self, prefill: Engine, decode: Engine, job: Job, transfer: int = 1) -> None:
        self.prefill, self.decode, self.transfer = prefill, decode, transfer
        self.grant = granted(decode, job, str(transfer))
        self.sent: set[int] = set()
        prefill.add(job, transfer=transfer, first_block=self.grant.first_block, prefill_only=True)

    def carry(self) -> Generated | None:
        """Send what is announced; the first token, once there is one."""
        first = None
        for event in self.prefill.events:
            if isinstance(event, Computed) and event.transfer == self.transfer:
                for index, ours in event.blocks:
                    theirs = self.grant.block_ids[index - self.grant.first_block]
                    runner_of(self.decode).kv[theirs] = runner_of(self.prefill).kv[ours]
                    self.sent.add(index)
            elif isinstance(event, Generated) and event.handover == self.transfer:
                first = event
        return first

    def land(self) -> None:
        while (first := self.carry()) is None:
            assert self.prefill.step()
        count = self.grant.first_block + len(self.grant.block_ids)
        assert self.sent == set(range(self.grant.first_block, count)), "every granted block is sent"
        self.decode.start(str(self.transfer), first.delta)
        self.prefill.transfer_holds.ship_quiet(self.transfer)


def begin(engine: Engine, name: str = "a", later: int = 1) -> OutboundMigration:
    return engine.moving.begin((name, later - 1), later, lambda job: later)


def move_over(source: Engine, move: OutboundMigration, target: Engine, grant: Reserved, stand: Snapshot) -> None:
    for index, ours in (*enumerate(move.full), *stand.rest):
        if index >= grant.first_block:
            runner_of(target).kv[grant.block_ids[index - grant.first_block]] = runner_of(source).kv[ours]
    target.start("g", stand.first, stand.covered)
    source.moving.done(move.transfer)
    source.moving.quiet(move.transfer)


BUDDY = DecodeTarget("buddy", 1, "there", FINGERPRINT)


def copy(source: Engine, target: Engine, most: int = 100) -> int:
    """Copy the stream that is due, as nodes do; how many blocks it has at the buddy, those of a state included."""
    (request,) = source.copies.due(1)
    length = source.copies.copyable(request)
    assert source.states is not None
    names = source.states.chain(request.hashes[:length])
    first, block_ids = target.copies.reserve("copy", names, most)
    chain = source.copies.chain(request, length)
    assert chain is not None
    assert len(chain) == len(names)
    for (_, ours), theirs in zip(
        source.copies.hold_copy(7, chain[: first + len(block_ids)], first), block_ids, strict=True
    ):
        runner_of(target).kv[theirs] = runner_of(source).kv[ours]
    target.copies.land("copy")
    source.copies.returned(7)
    return first + len(block_ids)
