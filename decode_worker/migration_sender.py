"""Sending side of stream migration on a draining decode node.

A move's way: offered to the other node while the stream runs on → granted → its full blocks sent → the stream stands
still, and its last block and its last tokens go → acknowledged: the stream ends here. Whatever fails, it runs on here.
"""

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
"""Moves under way: few share the link with a stream that stands still, and not each answer is awaited by itself."""
GRANT_S = 5.0
"""How long the other node may keep a stream waiting for its blocks before another is tried."""
STALL_S = 1.5
"""How long nothing may move between the two: the client of a stream that stands still sees nothing meanwhile."""
LOOK_S = 0.2
"""How often it is seen whether who asked for a move still waits for it."""


@dataclass(slots=True, eq=False)
class OutgoingMigration:
    """A move until its ship is quiet. stood_at: when the stream stopped."""

    move: OutboundMigration
    target: DecodeTarget
    answer: asyncio.Future[None]
    stood_at: float | None = None


class MigrationSender:
    """Implements kv_transfer.ports.ShipEvents. Nothing here passes the asyncio loop but the question and its answer."""

    def __init__(self, base: Base, sender: Sender) -> None:
        self._base, self.sender = base, sender
        self._lock = threading.Lock()
        self._open: dict[int, OutgoingMigration] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._asked = 0
        self._patience = ShipTimeouts(min(GRANT_S, base.settings.grant_timeout), STALL_S)

    # The asyncio loop.

    def busy(self) -> bool:
        """Return whether somebody waits for an answer, or blocks may still be sent from."""
        return bool(self._asked or self._open)

    async def move(self, request: MoveRequest, left: Callable[[], Awaitable[bool]]) -> None:
        """Returns once the other node goes on with the stream.

        Raises why it runs on here: never NodeLost, which to a router is this node. left: whether who asks has gone;
        then nothing is begun for it any more, and what was begun is given up: the stream runs on, and may be moved
        elsewhere."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked += 1
        try:
            async with self._turns:
                if await left():
                    raise Cancelled("nobody waits for the move any more")
                self._base.engine.submit(lambda engine: self._begin(engine, request, answer))
                while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                    if await left():
                        self._give_up(answer)
                await answer
        finally:
            self._asked -= 1
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # who asked may be gone before it is told: then nobody else looks at it

    def _give_up(self, answer: asyncio.Future[None]) -> None:
        """A move that nobody waits for any more, if it was begun."""
        with self._lock:
            given = [transfer for transfer, departure in self._open.items() if departure.answer is answer]
        for transfer in given:
            self.sender.abort(transfer, "nobody waits for the move any more")

    # The engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """A stream that ended here does not move."""
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
                        request.target, _without(job, request.target), self, patience=self._patience
                    ),
                )
                self._open[move.transfer] = OutgoingMigration(move, request.target, answer)
        except Exception as error:
            self._answer(answer, error if isinstance(error, KvferryError) else TransferFailed(reason(error)))

    def _stand(self, engine: Engine, transfer: int) -> None:
        """All that the stream had in full blocks is sent: the rest goes now."""
        departure = self._find(transfer)
        stand = engine.moving.stand(transfer) if departure is not None else None
        if departure is None or stand is None:
            self.sender.abort(transfer, "the stream does not run any more")
            return
        departure.stood_at = time.monotonic()
        self.sender.ship(transfer, stand.rest)
        self.sender.commit(transfer, stand.first, stand.covered)

    # The link thread.

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
        self._base.outflow.note("move", departure.target.node_id, stats)
        self._base.call_soon(lambda: self._moved(stats, stood_s))
        self._answer(departure.answer, None)

    def failed(self, transfer: int, error: KvferryError) -> None:
        departure = self._find(transfer)
        assert departure is not None
        self._base.engine.submit(lambda engine: engine.moving.failed(transfer))
        self._base.metrics.ships["failed"].inc()
        self._answer(departure.answer, error)

    def quiet(self, transfer: int) -> None:
        """`busy` ends when the engine has let go of the blocks."""

        def quiet(engine: Engine) -> None:
            engine.moving.quiet(transfer)
            with self._lock:
                self._open.pop(transfer, None)

        self._base.engine.submit(quiet)

    # Any thread.

    def _find(self, transfer: int) -> OutgoingMigration | None:
        with self._lock:
            return self._open.get(transfer)

    def _answer(self, answer: asyncio.Future[None], error: KvferryError | None) -> None:
        """To who asked for the move, unless it went away."""

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
    """Nobody is their own buddy."""
    return replace(job, buddy=None) if job.buddy == target else job
