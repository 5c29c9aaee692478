"""Sending side of stream migration on a draining decode node.

Steps of a migration: offered to the other node while the stream runs → granted → full blocks sent → the stream pauses,
and its last block and last tokens are sent → acknowledged; the stream ends here. If a step fails, the stream continues
here."""

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
from kvferry.worker.service import Base

AT_ONCE = 8
"""Migrations in flight at once.

Few of them share the link with a paused stream, and several answers are awaited at a time."""
GRANT_S = 5.0
"""Seconds to wait for the other node's grant; the router then tries another node."""
STALL_S = 1.5
"""Seconds without progress after which a ship fails, since the client of a paused stream gets no tokens."""
PAUSE_S = 3.0
"""Longest pause of a stream for its hand-over, in seconds; over a slower link the stream continues here."""
LOOK_S = 0.2
"""Seconds between two checks whether the router still waits for the migration, and how long its stream has paused."""


@dataclass(slots=True, eq=False)
class OutgoingMigration:
    """Migration in progress, until its ship is quiet.

    stood_at: monotonic time at which the stream paused."""

    move: OutboundMigration
    target: DecodeTarget
    answer: asyncio.Future[None]
    stood_at: float | None = None

    @property
    def paused_s(self) -> float:
        """Return for how long the stream has paused, in seconds; 0 while it runs."""
        return time.monotonic() - self.stood_at if self.stood_at is not None else 0.0


class MigrationSender:
    """Sender of streams to other decode nodes.

    Implements `kv_transfer.ports.ShipEvents`. Only the router's request and its answer pass the asyncio loop."""

    def __init__(self, base: Base, sender: Sender) -> None:
        self._base, self.sender = base, sender
        self._lock = threading.Lock()
        self._open: dict[int, OutgoingMigration] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._asked = 0
        self._timeouts = ShipTimeouts(min(GRANT_S, base.settings.grant_timeout), STALL_S)

    # On the asyncio loop.

    def busy(self) -> bool:
        """Return whether a router waits for an answer, or ships may still read blocks."""
        return bool(self._asked or self._open)

    async def move(self, request: MoveRequest, left: Callable[[], Awaitable[bool]]) -> None:
        """Move a stream; return once the other node continues it.

        Raises the reason if it stays here, but never NodeLost, which a router would take for the loss of this node.
        left: returns whether the router has disconnected. Then a new migration does not begin and a running one is
        aborted, as is one whose stream pauses for PAUSE_S; the stream continues here and can be moved elsewhere."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked += 1
        try:
            async with self._turns:
                if await left():
                    raise Cancelled("the migration is no longer wanted")
                self._base.engine.submit(lambda engine: self._begin(engine, request, answer))
                while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                    if await left():
                        self._give_up(answer, "the migration is no longer wanted")
                    self._give_up(answer, f"its stream paused for {PAUSE_S:g} s", paused_s=PAUSE_S)
                await answer
        finally:
            self._asked -= 1
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # mark as retrieved: the router may have disconnected

    def _give_up(self, answer: asyncio.Future[None], why: str, paused_s: float = 0.0) -> None:
        """Abort the migration with that answer if it has begun, and its stream has paused for so many seconds."""
        with self._lock:
            given = [
                transfer
                for transfer, departure in self._open.items()
                if departure.answer is answer and departure.paused_s >= paused_s
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
            gone = [transfer for transfer, departure in self._open.items() if departure.move.request.key in ended]
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

    def _stand(self, engine: Engine, transfer: int) -> None:
        """Pause the stream, whose full blocks are sent, and send the rest."""
        departure = self._find(transfer)
        stand = engine.moving.stand(transfer) if departure is not None else None
        if departure is None or stand is None:
            self.sender.abort(transfer, "the stream no longer runs")
            return
        departure.stood_at = time.monotonic()
        self.sender.ship(transfer, stand.rest)
        self.sender.commit(transfer, stand.first, stand.covered)

    # Called on the link thread.

    def granted(self, transfer: int, first_block: int) -> None:
        departure = self._find(transfer)
        assert departure is not None
        full = list(enumerate(departure.move.full))[first_block:]
        if full:
            self.sender.ship(transfer, full)
        else:
            self._base.engine.submit(lambda engine: self._stand(engine, transfer))

    def sent(self, transfer: int) -> None:
        departure = self._find(transfer)
        if departure is not None and departure.stood_at is None:
            self._base.engine.submit(lambda engine: self._stand(engine, transfer))

    def done(self, transfer: int, stats: ShipStats) -> None:
        departure = self._find(transfer)
        assert departure is not None
        assert departure.stood_at is not None
        stood_s = time.monotonic() - departure.stood_at
        self._base.engine.submit(lambda engine: engine.moving.done(transfer))
        self._base.transfer_stats.note("move", departure.target.node_id, stats)
        self._base.call_soon(lambda: self._moved(stats, stood_s))
        self._answer(departure.answer, None)

    def failed(self, transfer: int, error: KvferryError) -> None:
        departure = self._find(transfer)
        assert departure is not None
        self._base.engine.submit(lambda engine: engine.moving.failed(transfer))
        self._base.metrics.ships["failed"].inc()
        self._answer(departure.answer, error)

    def quiet(self, transfer: int) -> None:
        """Release the blocks; `busy` stays true until the engine has done so."""

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

        def told() -> None:
            self._base.metrics.moves["stayed" if error else "moved"].inc()
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(TransferFailed(error.message) if isinstance(error, NodeLost) else error)

        self._base.call_soon(told)

    def _moved(self, stats: ShipStats, stood_s: float) -> None:
        self._base.shipped(stats)
        self._base.metrics.move_blocks.inc(stats.blocks)
        self._base.metrics.move_pause.inc(stood_s)


def _without(job: Job, target: DecodeTarget) -> Job:
    """Return the job without its buddy, if the target is that buddy: no node is its own buddy."""
    return replace(job, buddy=None) if job.buddy == target else job
