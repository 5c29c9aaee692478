"""Publisher of KV events as vLLM has it: PUB with sequence numbers, and a ROUTER that repeats recent batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from kvferry.engine_adapter.engine import KvEventSource

END = b"\xff" * 8


def pack(events: Sequence[Any], sent_at: float | None = None) -> bytes:
    """Payload of one batch."""
    return msgpack.packb([time.time() if sent_at is None else sent_at, list(events), 0])


OPEN: list[zmq.Context[Any]] = []
"""Contexts that are not closed. One that is collected together with its sockets waits for them for ever."""


class MockKvEvents:
    """Binds to ports of the kernel. Belongs to one asyncio loop; `publish` never waits.

    ring: batches kept for repeating; repeats: whether there is a replay socket; replay_hwm: messages that it queues for
    one client before it drops more."""

    def __init__(
        self, *, topic: str = "", ring: int = 10_000, repeats: bool = True, hwm: int = 100_000, replay_hwm: int = 1000
    ) -> None:
        self._topic, self._number = topic.encode(), 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self._context: zmq.Context[Any] = zmq.Context()
        OPEN.append(self._context)
        self._pub = self._context.socket(zmq.XPUB)  # A PUB that sees subscriptions.
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.set_hwm(hwm)
        endpoint, replay = self._bound(self._pub), ""
        self.asked: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []
        if repeats:
            self._router = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, replay_hwm)
            replay = self._bound(self._router)
            self._tasks.append(asyncio.create_task(self._repeat(self._router)))
        self.source = KvEventSource(endpoint, replay, topic)

    def publish(self, events: Sequence[Any], *, drop: bool = False, times: int = 1) -> int:
        """Publish a batch and return its number. drop: only the ring gets it; times: copies sent."""
        return self.publish_payload(pack(events), drop=drop, times=times)

    def publish_payload(self, payload: bytes, *, drop: bool = False, times: int = 1) -> int:
        number, self._number = self._number, self._number + 1
        for _ in range(0 if drop else times):
            self.send(number, payload)
        self._ring.append((number, payload))
        return number

    def send(self, number: int, payload: bytes) -> None:
        """Send a message that the ring does not get."""
        self.send_frames([self._topic, number.to_bytes(8, "big"), payload])

    def send_frames(self, frames: list[bytes]) -> None:
        self._pub.send_multipart(frames, zmq.NOBLOCK)

    def restart(self) -> None:
        """Begin at number 0 with an empty ring, as a new process does."""
        self._number = 0
        self._ring.clear()

    async def subscribed(self) -> None:
        """Return once one more subscriber gets what is published."""
        while not self._pub.poll(0):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert self._pub.recv()[:1] == b"\1"

    def kv_event_sources(self) -> dict[str, Any]:
        """Answer of `GET /kv_event_sources`."""
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.source.endpoint,
                "replay_endpoint": self.source.replay or None,
                "topic": self.source.topic,
            }
        }

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            self._router.close(linger=0)
        self._context.destroy(linger=0)
        OPEN.remove(self._context)

    def _bound(self, socket: zmq.Socket) -> str:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def _repeat(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for number, payload in list(self._ring):
                if number >= self.asked[-1]:
                    await router.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", END, b""])
