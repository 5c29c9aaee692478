"""Sending side of stream migration: a draining decode node moves each stream that the router asks it to move.

Steps of a migration: offered to the other node while the stream runs → granted → full blocks sent → the stream pauses,
and its last block and last tokens are sent → acknowledged; the stream ends here. If a step fails, the stream continues
on this node."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.engine.engine import Engine
from kvferry.engine.events import Event, Failed, Generated
from kvferry.engine.migration import OutboundMigration
from kvferry.kv_transfer.ports import ShipStats
from kvferry.kv_transfer.sender import Sender
from kvferry.kv_transfer.sender_ship import ShipTimeouts
from kvferry.protocol.errors import Cancelled, KvferryError, NodeLost, TransferFailed, reason
from kvferry.protocol.messages import DecodeTarget, Job, MoveRequest
from kvferry.worker.service import NodeParts

AT_ONCE = 8
"""Maximum number of migrations in flight.

Few enough to leave the link to a paused stream, enough to wait for several answers at once."""
GRANT_S = 5.0
"""Maximum time to wait for the other node's grant, in seconds; the router then tries another node."""
STALL_S = 1.5
"""Seconds without progress after which a ship fails, since the client of a paused stream gets no tokens."""
PAUSE_S = 3.0
"""Maximum pause of a stream for its migration, in seconds; over a slower link the stream continues on this node."""
CHECK_S = 0.2
"""Seconds between checks of whether the router still waits and how long the stream has been paused."""


@dataclass(slots=True, eq=False)
class OutgoingMigration:
    """Migration whose transfer may still read blocks.

    paused_at: monotonic time at which the stream paused."""

    move: OutboundMigration
    target: DecodeTarget
    answer: asyncio.Future[None]
    paused_at: float | None = None

    @property
    def paused_s(self) -> float:
        """Return for how long the stream has been paused, in seconds; 0 while it runs."""
        return time.monotonic() - self.paused_at if self.paused_at is not None else 0.0


class MigrationSender:
    """Sender of streams to other decode nodes.

    Implements `kv_transfer.ports.ShipEvents`. Only the router's request and its answer run on the asyncio loop."""

    def __init__(self, base: NodeParts, sender: Sender) -> None:
        self._base, self.sender = base, sender
        self._lock = threading.Lock()
        self._open: dict[int, OutgoingMigration] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._starting = 0
        self._timeouts = ShipTimeouts(min(GRANT_S, base.settings.grant_timeout), STALL_S)

    # On the asyncio loop.

    def busy(self) -> bool:
        """Return whether a router waits for an answer, or ships may still read blocks."""
        return bool(self._starting or self._open)

    async def move(self, request: MoveRequest, left: Callable[[], Awaitable[bool]]) -> None:
        """Move a stream; return once the other node continues it.

        Raises the reason if it stays here, but never NodeLost, which a router would take for the loss of this node.
        left: returns whether the router has disconnected. In that case a new migration does not begin, and a running
        one is aborted, as is one whose stream has been paused for PAUSE_S. The stream then continues here, and can be
        moved to another node."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starting += 1
        try:
            async with self._turns:
                if await left():
                    raise Cancelled("the migration is no longer wanted")
                self._base.engine.submit(lambda engine: self._begin(engine, request, answer))
                while not (await asyncio.wait({answer}, timeout=CHECK_S))[0]:
                    if await left():
                        self._abandon(answer, "the migration is no longer wanted")
                    self._abandon(answer, f"its stream has been paused for {PAUSE_S:g} s", paused_s=PAUSE_S)
                await answer
        finally:
            self._starting -= 1
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # mark as retrieved: the router may have disconnected

    def _abandon(self, answer: asyncio.Future[None], why: str, paused_s: float = 0.0) -> None:
        """Abort the migration that `answer` belongs to, if begun and its stream has been paused for `paused_s`."""
        with self._lock:
            given = [
                transfer
                for transfer, migration in self._open.items()
                if migration.answer is answer and migration.paused_s >= paused_s
            ]
        for transfer in given:
            self.sender.abort(transfer, why)

    # On the engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """Abort the migrations of streams that ended here."""
        if not self._open:
            return
        ended = {e.key for e in events if isinstance(e, Failed) or (isinstance(e, Generated) and e.delta.finish_reason)}
        with self._lock:
            gone = [transfer for transfer, migration in self._open.items() if migration.move.request.key in ended]
        for transfer in gone:
            self.sender.abort(transfer, "the stream ended")

    def _begin(self, engine: Engine, request: MoveRequest, answer: asyncio.Future[None]) -> None:
        try:
            with self._lock:  # the grant may come before `begin` returns
                move = engine.moving.begin(
                    (request.request_id, request.attempt),
                    request.later,
                    lambda job: self.sender.offer(
                        request.target, _without(job, request.target), self, timeouts=self._timeouts
                    ),
                )
                self._open[move.transfer] = OutgoingMigration(move, request.target, answer)
        except Exception as error:
            self._answer(answer, error if isinstance(error, KvferryError) else TransferFailed(reason(error)))

    def _pause(self, engine: Engine, transfer: int) -> None:
        """Pause the stream, whose full blocks have been sent, and send the rest."""
        migration = self._find(transfer)
        pause = engine.moving.snapshot(transfer) if migration is not None else None
        if migration is None or pause is None:
            self.sender.abort(transfer, "the stream no longer runs")
            return
        migration.paused_at = time.monotonic()
        self.sender.ship(transfer, pause.rest)
        self.sender.commit(transfer, pause.first, pause.covered)

    # Called on the link thread.

    def granted(self, transfer: int, first_block: int) -> None:
        migration = self._find(transfer)
        assert migration is not None
        full = list(enumerate(migration.move.full))[first_block:]
        if full:
            self.sender.ship(transfer, full)
        else:
            self._base.engine.submit(lambda engine: self._pause(engine, transfer))

    def sent(self, transfer: int) -> None:
        migration = self._find(transfer)
        if migration is not None and migration.paused_at is None:
            self._base.engine.submit(lambda engine: self._pause(engine, transfer))

    def done(self, transfer: int, stats: ShipStats) -> None:
        migration = self._find(transfer)
        assert migration is not None
        assert migration.paused_at is not None
        pause_s = time.monotonic() - migration.paused_at
        self._base.engine.submit(lambda engine: engine.moving.done(transfer))
        self._base.transfer_stats.note("move", migration.target.node_id, stats)
        self._base.call_soon(lambda: self._moved(stats, pause_s))
        self._answer(migration.answer, None)

    def failed(self, transfer: int, error: KvferryError) -> None:
        migration = self._find(transfer)
        assert migration is not None
        self._base.engine.submit(lambda engine: engine.moving.failed(transfer))
        self._base.metrics.ships["failed"].inc()
        self._answer(migration.answer, error)

    def quiet(self, transfer: int) -> None:
        """Release the blocks, which no send reads any more; `busy` stays true until the engine has done so."""

        def quiet(engine: Engine) -> None:
            engine.moving.quiet(transfer)
            with self._lock:
                self._open.pop(transfer, None)

        self._base.engine.submit(quiet)

    # On any thread.

    def _find(self, transfer: int) -> OutgoingMigration | None:
        with self._lock:
            return self._open.get(transfer)

    def _answer(self, answer: asyncio.Future[None], error: KvferryError | None) -> None:
        """Answer the router's request, unless it has disconnected."""

        def report() -> None:
            self._base.metrics.moves["stayed" if error else "moved"].inc()
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(TransferFailed(error.message) if isinstance(error, NodeLost) else error)

        self._base.call_soon(report)

    def _moved(self, stats: ShipStats, pause_s: float) -> None:
        self._base.shipped(stats)
        self._base.metrics.move_blocks.inc(stats.blocks)
        self._base.metrics.move_pause.inc(pause_s)


def _without(job: Job, target: DecodeTarget) -> Job:
    """Return the job without its buddy (the node that keeps copies of its blocks), if the target is that buddy."""
    return replace(job, buddy=None) if job.buddy == target else job
