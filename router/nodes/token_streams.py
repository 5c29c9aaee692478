"""TokenStreams: keeps one HTTP stream to each node, with the output of all this router's requests and a heartbeat.

A broken stream resumes after its last frame, without an effect on clients. A node whose stream is silent is suspected,
and its requests may get a second attempt elsewhere. A node and all its requests are lost if its address refuses
connections, if another process answers there, or after LOST times the silence limit, or longer if its heartbeats were
often late (see SLOW). Until then the node gets no new requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from kvferry.placement.types import NodeKey
from kvferry.protocol.errors import Fenced, KvferryError, NodeDown, NodeLost
from kvferry.protocol.messages import StepFrame
from kvferry.protocol.wire import WireError
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.delta_queue import DeltaQueue
from kvferry.router.nodes.node_entry import NodeEntry

log = logging.getLogger(__name__)

LOST = 2.0
"""Multiple of the silence limit after which a stream counts as lost."""
SLOW, MAX_LOST_S, HALF_S = 3.0, 4.0, 30.0
"""Multiple of the longest recent gap between two signs of life that a stream may be silent before it counts as lost,
the longest such silence in seconds, and the half-life of that gap in seconds.

A process on an overloaded machine often sends its heartbeats late, but is not lost."""
ACKNOWLEDGE_S = 1.0
"""Interval of acknowledgements to a node, in seconds."""


class TokenStreams:
    """Keeps a token stream open to every node and passes its frames to the node's entry, through a `DeltaQueue`."""

    def __init__(self, client: NodeClient, *, first_backoff_s: float = 0.05, last_backoff_s: float = 2.0) -> None:
        self._client = client
        self._backoff = (first_backoff_s, last_backoff_s)
        self._queue = DeltaQueue()
        self._streams: dict[NodeKey, tuple[NodeEntry, asyncio.Task[None]]] = {}

    def keep(self, nodes: Iterable[NodeEntry]) -> None:
        """Open streams to exactly these nodes and close all others."""
        wanted = {entry.key: entry for entry in nodes}
        for key in [key for key in self._streams if key not in wanted]:
            entry, task = self._streams.pop(key)
            task.cancel()
            self._queue.flush()
            entry.broken(NodeLost(f"{key[0]} left"))
        for key in [key for key in wanted if key not in self._streams]:
            stream = TokenStream(self._client, wanted[key], self._queue)
            task = asyncio.create_task(stream.read(*self._backoff), name=f"stream-{key[0]}")
            self._streams[key] = (wanted[key], task)

    async def close(self) -> None:
        """Close every stream; the nodes then cancel all requests of this router."""
        tasks = [task for _, task in self._streams.values()]
        self.keep(())
        await asyncio.gather(*tasks, return_exceptions=True)


class TokenStream:
    """Token stream of one node; `_seen` is the last frame's number, None if the stream cannot resume."""

    def __init__(self, client: NodeClient, entry: NodeEntry, queue: DeltaQueue) -> None:
        self._client, self._entry, self._queue = client, entry, queue
        self._seen: int | None = None
        self._alive_at, self._gap_s = 0.0, 0.0

    async def read(self, first_s: float, last_s: float) -> None:
        """Keep the stream open until cancelled, with pauses growing from `first_s` to `last_s` between failed tries."""
        acknowledging = asyncio.create_task(self._acknowledge())
        pause_s = 0.0
        try:
            while True:
                was_open = await self._read_once()
                pause_s = 0.0 if was_open else min(max(first_s, 2 * pause_s), last_s if self._seen is None else first_s)
                await asyncio.sleep(pause_s)
        finally:
            acknowledging.cancel()

    async def _read_once(self) -> bool:
        """Read the stream until it breaks; return whether it had been open."""
        opened = False

        def accepted() -> None:
            nonlocal opened
            if self._seen is None:
                self._alive_at, self._gap_s = self._client.clock(), 0.0
            opened, self._seen = True, self._seen or 0
            self._mark_alive()
            self._entry.opened()

        try:
            await self._client.stream(self._entry.lease, self._seen, accepted, self._deal)
        except KvferryError as error:
            self._ended(error)
        except Exception:
            log.exception("the token stream of %s failed", self._entry.key[0])
            self._lose(NodeLost(f"{self._entry.key[0]}: unreadable token stream"))
        return opened

    def _deal(self, frame: StepFrame) -> None:
        assert self._seen is not None
        self._mark_alive()
        content = bool(frame.deltas or frame.failed or frame.deviations)
        if frame.number > self._seen + content:
            raise WireError(f"frame {frame.number} came after {self._seen}")
        if content and 0 < frame.number <= self._seen:
            return
        self._seen = max(self._seen, frame.number)
        self._queue.deal(self._entry, frame)

    def _mark_alive(self) -> None:
        """Record a sign of life of the node, and how long it was silent before."""
        now = self._client.clock()
        gap_s = now - self._alive_at
        self._alive_at, self._gap_s = now, max(gap_s, self._gap_s * 0.5 ** (gap_s / HALF_S))

    @property
    def _lost_s(self) -> float:
        """Return the seconds of silence after which the node counts as lost."""
        return max(LOST * self._client.silence_s, min(SLOW * self._gap_s, MAX_LOST_S))

    def _ended(self, error: KvferryError) -> None:
        """Decide after a break or refusal whether the node is lost or the stream may resume."""
        if self._seen is None:
            return
        silent_s = self._client.clock() - self._alive_at
        if isinstance(error.__cause__, ConnectionRefusedError):
            self._lose(NodeDown(error.message))
        elif (
            not isinstance(error, NodeLost)
            or isinstance(error, Fenced)
            or isinstance(error.__cause__, WireError)
            or silent_s >= self._lost_s
        ):
            self._lose(error)
        elif self._entry.open:
            log.debug("token stream of %s broke, reconnecting: %s", self._entry.key[0], error)
            self._entry.pause(is_silent=isinstance(error.__cause__, TimeoutError))

    def _lose(self, error: KvferryError) -> None:
        if self._entry.linked:
            count = len(self._entry.listeners)
            level = logging.WARNING if count else logging.INFO
            log.log(level, "token stream ended with %d requests on it: %s", count, error)
        self._seen = None
        self._queue.flush()
        self._entry.broken(error if isinstance(error, NodeLost) else NodeLost(f"{self._entry.key[0]}: {error}"))

    async def _acknowledge(self) -> None:
        """Acknowledge frames: the node keeps unacknowledged ones, and considers a silent router frozen."""
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            if self._entry.open and self._seen is not None:
                with contextlib.suppress(KvferryError):
                    await self._client.seen(self._entry.lease, self._seen)
