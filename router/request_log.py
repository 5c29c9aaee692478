"""RequestLog: bounded log of recent requests, transfers and events, shown on the dashboard.

It is written a few times for each request, but never for a token."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.placement.types import Placement
from kvferry.protocol.messages import ShipDone
from kvferry.router.dispatch.interface import RequestSpec, Route

log = logging.getLogger(__name__)

RECENT, NOTES, SHIPS = 200, 200, 4096
"""Number of ended requests, events and ships that are kept, the latest last."""
MAX_DETAIL = 200
"""Longest description of an event, in characters; nodes may supply part of it."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Record of one dispatch, with times of the request log's clock.

    prefill, decode  node ids, empty until placed
    cached           prompt tokens reused
    retries          attempts after the first
    outcome          empty while running, then done, cancelled (its client left) or an error code
    """

    request_id: str
    tenant: str
    model: str
    work: str
    prompt: int
    arrived: float
    began: float
    prefill: str = ""
    decode: str = ""
    cached: int = 0
    first_at: float | None = None
    ended_at: float = 0.0
    retries: int = 0
    outcome: str = ""
    _tokens: Sequence[int] = ()
    _output: int = 0

    @property
    def output(self) -> int:
        """Return the number of output tokens so far."""
        return self._output or len(self._tokens)

    def sent(self, placement: Placement, *, migrates: bool = False) -> None:
        """Record the nodes of an attempt; migrates: the stream moves there, so its prompt is computed already."""
        if not migrates:
            self.prefill = placement.prefill.node_id if placement.prefill else ""
        self.decode = placement.decode.node_id if placement.decode else ""

    def end(self, outcome: str, now: float) -> None:
        """Record the end, and release the tokens, since records are kept for a long time."""
        self.outcome, self.ended_at = outcome, now
        self._output, self._tokens = len(self._tokens), ()


class LoggedEvent(NamedTuple):
    """Event: a step of the retry policy with its request and the nodes at fault, or a change of a node."""

    at: float
    kind: str
    nodes: tuple[str, ...]
    detail: str
    request_id: str = ""
    tenant: str = ""


class Shipped(NamedTuple):
    """Acknowledged transfer of blocks from a prefill to a decode node."""

    at: float
    prefill: str
    decode: str
    blocks: int
    size: int
    seconds: float


class RequestLog:
    """Recent activity of the router.

    `running` holds the running dispatches, oldest first. `recent`, `notes` and `ships` end with the latest entry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.running: dict[RequestRecord, None] = {}
        self.recent: deque[RequestRecord] = deque(maxlen=RECENT)
        self.notes: deque[LoggedEvent] = deque(maxlen=NOTES)
        self.ships: deque[Shipped] = deque(maxlen=SHIPS)

    def begin(self, spec: RequestSpec, model: str, tokens: Sequence[int]) -> RequestRecord:
        """Record the beginning of a dispatch; the caller must call `end`. `tokens` is its growing output."""
        call, work = spec.call, type(spec.work).__name__.lower()
        record = RequestRecord(
            spec.request_id, call.tenant, model, work, len(spec.token_ids), call.arrival, self.clock(), _tokens=tokens
        )
        self.running[record] = None
        return record

    def first(self, record: RequestRecord, route: Route) -> None:
        """Record the first token and the route of a dispatch."""
        record.first_at = self.clock()
        record.prefill, record.decode = route.prefill or "", route.decode or ""
        record.cached = route.reuse.cached_len

    def retried(self, record: RequestRecord | None, step: str, nodes: Sequence[str], detail: str = "") -> None:
        """Record a retry, a hedge or a migration of a dispatch."""
        if record is None:
            return
        record.retries += 1
        self.notes.append(
            LoggedEvent(self.clock(), step, tuple(nodes), detail[:MAX_DETAIL], record.request_id, record.tenant)
        )

    def end(self, record: RequestRecord | None, outcome: str) -> None:
        """Record the end of a dispatch; only the first call counts."""
        if record in self.running:
            del self.running[record]
            record.end(outcome, self.clock())
            self.recent.append(record)

    def node(self, kind: str, node_id: str, detail: str) -> None:
        """Record that a node joined, drains, or left."""
        self.notes.append(LoggedEvent(self.clock(), kind, (node_id,), detail[:MAX_DETAIL]))

    def shipped(self, placement: Placement, detail: ShipDone) -> None:
        """Record that the blocks of an attempt on this placement arrived."""
        log.debug(
            "%s shipped %d blocks in %.4f s, %.4f s exposed",
            detail.request_id, detail.blocks, detail.ship_s, detail.exposed_s,
        )  # fmt: skip
        if placement.prefill and placement.decode:
            pair = placement.prefill.node_id, placement.decode.node_id
            self.ships.append(Shipped(self.clock(), *pair, detail.blocks, detail.bytes, detail.ship_s))
