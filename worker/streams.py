"""Token streams of a node to routers: one per router, with one numbered frame per engine step, kept until acknowledged.

So a broken stream resumes at the right frame.

A router counts as lost, and all its work is cancelled, if it opens a new stream, is disconnected for ABSENT_S, is
silent on an open stream for FROZEN_S, or leaves more than KEPT_FRAMES or KEPT_BYTES unread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response

from kvferry.protocol.errors import Fenced, StreamLost
from kvferry.protocol.messages import Pulse, StepFrame
from kvferry.protocol.stream_messages import FrameAck
from kvferry.protocol.wire import Unwritable, pack
from kvferry.runtime.http import read_message
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker.message_stream import MessageStreamResponse

log = logging.getLogger("kvferry.worker")

HEARTBEAT_S = 0.4
"""Seconds between heartbeats; for a router, a stream is broken after 0.8 s without a frame."""
STALLED_S, STALLED_HEARTBEAT_S = 0.7, 0.1
"""Seconds without progress after which the engine or link counts as stalled, and seconds between heartbeats then.

Routers soon hedge the requests of such a node on other nodes, and clients wait meanwhile."""
ABSENT_S, FROZEN_S = 2.5, 5.0
"""Seconds that a router may be disconnected, or silent, not counting time in which this process was suspended.

For a router, a node is lost after 1.6 s, so nothing is kept for it much longer."""
KEPT_FRAMES, KEPT_BYTES = 4096, 64 * 2**20

Reader = asyncio.Queue[bytes | None]


@dataclass(slots=True, eq=False)
class FrameBuffer:
    """Frames kept for one router.

    frames: frames not acknowledged yet. last: number of the newest one. last_seen: time of the router's last sign of
    life or of its disconnect."""

    last_seen: float
    last: int = 0
    frames: deque[tuple[int, bytes]] = field(default_factory=deque)
    size: int = 0
    reader: Reader | None = None

    def put(self, frame: StepFrame) -> None:
        """Number, pack and queue a frame."""
        number = self.last + 1
        data = pack(StepFrame(frame.deltas, frame.failed, number, frame.pulse, frame.deviations))
        self.last = number
        self.frames.append((self.last, data))
        self.size += len(data)
        if self.reader is not None:
            self.reader.put_nowait(data)

    def forget(self, number: int) -> None:
        """Drop the frames up to `number`, which the router has received."""
        while self.frames and self.frames[0][0] <= number:
            self.size -= len(self.frames.popleft()[1])

    def read(self, after: int) -> Reader:
        """Start a reader at the frame after `after`; an older reader of the stream ends."""
        self.detach()
        self.forget(after)
        self.reader = asyncio.Queue()
        for _, data in self.frames:
            self.reader.put_nowait(data)
        return self.reader

    def detach(self) -> None:
        """End the current reader, if there is one."""
        if self.reader is not None:
            self.reader.put_nowait(None)
        self.reader = None


class RouterStreams:
    """Token streams by router id, owned by the asyncio loop.

    epoch     epoch of this process; a router that asks for another one is rejected
    pulse     returns the progress of the node's threads
    on_lost   called with the id of a lost router"""

    def __init__(
        self, epoch: int, pulse: Callable[[], Pulse], on_lost: Callable[[str], None], clock: LoopClock
    ) -> None:
        self._epoch, self._pulse, self._on_lost, self._clock = epoch, pulse, on_lost, clock
        self._routers: dict[str, FrameBuffer] = {}
        self._sinks: dict[str, Callable[[StepFrame], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def mount(self, app: FastAPI) -> None:
        """Add the stream endpoints to the app."""
        app.get("/streams/{router_id}")(self.get_stream)
        app.post("/streams/{router_id}/seen", status_code=202)(self.post_seen)

    def set_sink(self, router_id: str, sink: Callable[[StepFrame], None]) -> None:
        """Pass the frames of a router id to `sink`, in this process, instead of a stream."""
        self._sinks[router_id] = sink

    async def get_stream(self, router_id: str, epoch: int, after: int | None = None) -> Response:
        """Serve the token stream of a router."""
        reader = self.open(router_id, epoch, after)
        return MessageStreamResponse(frames(reader), on_close=lambda: self.close(router_id, reader))

    async def post_seen(self, router_id: str, request: Request) -> None:
        """Handle a router's acknowledgement of frames."""
        self.seen(router_id, (await read_message(request, FrameAck)).number)

    def open(self, router_id: str, epoch: int, after: int | None) -> Reader:
        """Resume a stream after frame `after`, or begin a new one.

        A new one cancels everything that runs for the router. Raises Fenced for another process's epoch, and StreamLost
        if frames after `after` are no longer kept."""
        if epoch != self._epoch:
            raise Fenced(f"the stream belongs to epoch {epoch}; this process has epoch {self._epoch}")
        if self._stopped:
            raise StreamLost("the process is stopping")
        buffer = self._routers.get(router_id)
        if after is not None:
            if (
                buffer is None
                or not (buffer.frames[0][0] - 1 if buffer.frames else buffer.last) <= after <= buffer.last
            ):
                raise StreamLost(f"frames after {after} are no longer kept")
        elif buffer is not None:
            self._lose(router_id, "opened a new stream")
            buffer = None
        if buffer is None:
            buffer = self._routers[router_id] = FrameBuffer(self._clock.now())
        buffer.last_seen = self._clock.now()
        reader = buffer.read(after or 0)
        reader.put_nowait(self._heartbeat(buffer))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._send_heartbeats)
        return reader

    @property
    def followed(self) -> bool:
        """Return whether a router is connected, or may reconnect."""
        return bool(self._routers)

    def close(self, router_id: str, reader: Reader) -> None:
        """Detach a reader that disconnected; its router may reconnect."""
        buffer = self._routers.get(router_id)
        if buffer is not None and buffer.reader is reader:
            buffer.reader, buffer.last_seen = None, self._clock.now()

    def seen(self, router_id: str, number: int) -> None:
        """Drop the frames up to `number`, which the router has received."""
        buffer = self._routers.get(router_id)
        if buffer is not None and buffer.reader is not None:
            buffer.last_seen = self._clock.now()
            buffer.forget(number)

    def publish(self, router_id: str, frame: StepFrame) -> None:
        """Queue one frame for a router; for an unknown router, cancel what runs for it."""
        if (sink := self._sinks.get(router_id)) is not None:
            sink(frame)
            return
        buffer = self._routers.get(router_id)
        if buffer is None:
            self._on_lost(router_id)
            return
        try:
            buffer.put(frame)
        except Unwritable:
            log.exception("a frame cannot be serialised")
            self._lose(router_id, "cannot receive its frame")
            return
        if len(buffer.frames) > KEPT_FRAMES or buffer.size > KEPT_BYTES:
            self._lose(router_id, f"has not read {len(buffer.frames)} frames")

    def stop(self) -> None:
        """End every stream after its queued frames."""
        self._stopped = True
        for buffer in self._routers.values():
            buffer.detach()
        self._routers.clear()

    def _send_heartbeats(self) -> None:
        """Send heartbeats on idle streams; routers that are absent or silent for too long are lost."""
        now = self._clock.now()
        for router_id, buffer in list(self._routers.items()):
            if now - buffer.last_seen > (FROZEN_S if buffer.reader else ABSENT_S):
                self._lose(router_id, "is silent" if buffer.reader else "is disconnected")
            elif buffer.reader is not None and buffer.reader.empty():
                buffer.reader.put_nowait(self._heartbeat(buffer))
        pulse = self._pulse()
        period_s = STALLED_HEARTBEAT_S if max(pulse.engine_s, pulse.link_s) > STALLED_S else HEARTBEAT_S
        self._timer = asyncio.get_running_loop().call_later(period_s, self._send_heartbeats) if self._routers else None

    def _heartbeat(self, buffer: FrameBuffer) -> bytes:
        return pack(StepFrame(number=buffer.last, pulse=self._pulse()))

    def _lose(self, router_id: str, why: str) -> None:
        log.info("%s %s: aborting its requests", router_id, why)
        self._routers.pop(router_id).detach()
        self._on_lost(router_id)


async def frames(reader: Reader) -> AsyncIterator[bytes]:
    """Iterate over a stream's frames until it ends."""
    while (frame := await reader.get()) is not None:
        yield frame
