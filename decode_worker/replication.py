"""Replication of running streams: copies their full blocks in the background to a buddy node, for recovery.

Few streams replicate at a time, and no stream waits for it. A failed copy is retried together with newer blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine.engine import Engine
from kvferry.engine.events import BlocksChanged, Event
from kvferry.engine.request import Request
from kvferry.kv_transfer.ports import ShipStats
from kvferry.kv_transfer.sender import Sender
from kvferry.kv_transfer.sender_ship import ShipTimeouts
from kvferry.protocol.errors import Draining, GrantRefused, KvferryError
from kvferry.protocol.link_messages import Copy
from kvferry.protocol.media import media_within
from kvferry.protocol.messages import DecodeTarget
from kvferry.worker.service import NodeParts

MAX_BLOCKS = 256
"""Maximum number of blocks in one copy."""
AT_ONCE = 4
"""Maximum number of copies in flight; a busy buddy grants them between two of its steps."""
CHECK_S = 0.02
"""Seconds between two searches for streams to copy."""
REST = 3
"""Pause after a copy, as a multiple of its transfer time."""
BACKOFF_S = 5.0
"""Seconds for which a buddy gets no copies after it refused, failed or dropped one.

The time doubles with each failure in a row."""
MAX_BACKOFF_S = 80.0
"""Maximum time for which a buddy gets no copies, in seconds."""
DEADLINE_S = 30.0
"""Deadline of a copy, in seconds."""
GRANT_S, STALL_S = 5.0, 1.5
"""Maximum time that a copy waits for the buddy's grant, and time without progress until it fails, in seconds."""


@dataclass(slots=True, eq=False)
class ReplicaInProgress:
    """Copy in flight.

    length: number of the stream's blocks that could be copied at the time of the offer. most: maximum number of blocks
    of the copy. copied: number of the stream's blocks that the buddy has after it. held_at: time at which the transfer
    began. took_s: duration of the transfer in seconds. given_up: it ended through no fault of the buddy."""

    request: Request
    buddy: DecodeTarget
    length: int
    most: int
    copied: int = 0
    held_at: float = 0.0
    took_s: float = 0.0
    given_up: bool = False


class Replication:
    """Sender of replica blocks to buddy nodes.

    Implements `kv_transfer.ports.ShipEvents`."""

    def __init__(self, base: NodeParts, sender: Sender) -> None:
        self._base, self._sender = base, sender
        self._timeouts = ShipTimeouts(min(GRANT_S, base.settings.grant_timeout), STALL_S)
        self._lock = threading.Lock()
        self._making: dict[int, ReplicaInProgress] = {}
        self._next = 0.0
        self._backoffs: dict[DecodeTarget, tuple[float, float]] = {}
        """Per buddy: monotonic time at which it gets copies again, and the length of the pause in seconds."""

    # On the engine thread.

    def take(self, events: Sequence[Event]) -> None:
        """Start a search for streams to copy if a stream has a new block."""
        if (
            len(self._making) < AT_ONCE
            and time.monotonic() >= self._next
            and any(isinstance(e, BlocksChanged) for e in events)
        ):
            self._base.engine.submit(self._begin)

    def _begin(self, engine: Engine) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + CHECK_S
        try:
            self._base.require_ready()
        except Draining:
            return
        in_flight = {making.request.key for making in self._making.values()}
        paused = {buddy for buddy, (until, _) in self._backoffs.items() if until > now}
        for request in engine.copies.due(AT_ONCE - len(in_flight), in_flight, paused):
            self._offer(engine, request)

    def _offer(self, engine: Engine, request: Request) -> None:
        job, length = request.job, engine.copies.copyable(request)
        assert job.buddy
        tokens = tuple(request.token_ids[: length * request.block_size])
        most = MAX_BLOCKS + (engine.states.max_sent_blocks if engine.states is not None else 0)
        copy = Copy(tokens, most, job.namespace, job.adapter, DEADLINE_S, media_within(job.media, len(tokens)))
        with self._lock:  # the grant may come before `offer` returns
            transfer = self._sender.offer(job.buddy, copy, self, timeouts=self._timeouts)
            self._making[transfer] = ReplicaInProgress(request, job.buddy, length, most)

    def _hold(self, engine: Engine, transfer: int, making: ReplicaInProgress, first: int) -> None:
        """Send the next blocks; the buddy has the blocks before `first`.

        If it now has fewer than it confirmed before, it evicts replicas, and the copy is aborted."""
        request = making.request
        if request.copied is not None and first < request.copied:
            request.copied = first
            self._sender.abort(transfer, "the buddy dropped the copies")
            return
        chain = engine.copies.chain(request, making.length)
        if chain is None:
            making.given_up = True
            self._sender.abort(transfer, "the stream no longer runs")
            return
        upto, whole = min(first + making.most, len(chain)), len(chain)
        # Without the end of its checkpoint a copy is of no use yet: the stream is due again at once.
        making.copied = upto if whole == making.length else making.length if upto == whole else 0
        blocks, making.held_at = engine.copies.hold_copy(transfer, chain[:upto], first), time.monotonic()
        self._sender.ship(transfer, blocks)
        self._sender.commit(transfer, None)

    def _quiet(self, engine: Engine, transfer: int) -> None:
        """Release the blocks and set the pause before the next copy; a failed copy adds none."""
        engine.copies.returned(transfer)
        with self._lock:
            making = self._making.pop(transfer)
        self._next = max(time.monotonic(), self._next) + REST * making.took_s

    def _back_off(self, buddy: DecodeTarget) -> None:
        now = time.monotonic()
        self._backoffs = {each: backoff for each, backoff in self._backoffs.items() if backoff[0] + MAX_BACKOFF_S > now}
        _, before = self._backoffs.get(buddy, (now, BACKOFF_S / 2))
        long = min(2 * before, MAX_BACKOFF_S)
        self._backoffs[buddy] = now + long, long

    # Called on the link thread.

    def granted(self, transfer: int, first_block: int) -> None:
        making = self._find(transfer)
        self._base.engine.submit(lambda engine: self._hold(engine, transfer, making, first_block))

    def sent(self, transfer: int) -> None:
        """Do nothing: all blocks of a copy are passed to the sender at once."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        making = self._find(transfer)
        making.took_s = time.monotonic() - making.held_at

        def done(engine: Engine) -> None:
            making.request.copied = making.copied
            self._backoffs.pop(making.buddy, None)

        self._base.engine.submit(done)
        self._base.metrics.copies["done"].inc()
        self._base.metrics.copy_blocks["sent"].inc(stats.blocks)
        self._base.transfer_stats.note("copy", making.buddy.node_id, stats)

    def failed(self, transfer: int, error: KvferryError) -> None:
        making = self._find(transfer)
        self._base.metrics.copies["refused" if isinstance(error, GrantRefused) else "failed"].inc()
        if not making.given_up:
            self._base.engine.submit(lambda engine: self._back_off(making.buddy))

    def quiet(self, transfer: int) -> None:
        self._base.engine.submit(lambda engine: self._quiet(engine, transfer))

    def _find(self, transfer: int) -> ReplicaInProgress:
        with self._lock:
            return self._making[transfer]
