"""ZeroMQ sockets of an engine's KV events: its publisher, and the socket that repeats recent batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from kvferry.engine_adapter.engine import KvEventSource
from kvferry.protocol.errors import ConfigError

MAX_QUEUED_BATCHES = 20_000
"""Maximum number of batches that wait in a socket: more than an engine keeps, so that none is dropped."""
MAX_BATCH_BYTES = 64 << 20
"""Maximum size of a payload, in bytes; ZeroMQ ends the connection of a larger one."""
END = (1 << 64) - 1
"""Sequence number of the end of an answer."""
Numbered = tuple[int, bytes]
"""A sequence number and a payload."""


_open: set[zmq.asyncio.Context] = set()
"""Contexts that are not closed. The garbage collector would hang in one whose sockets it collects, too."""


class ZmqEvents:
    """Connection to one engine's KV events. Belongs to one asyncio loop. Implements `kv_events.EventWire`.

    answer_s: maximum time between two parts of an answer, in seconds. Raises ConfigError for an unusable address."""

    def __init__(self, source: KvEventSource, answer_s: float = 2.0) -> None:
        self._source, self._answer_s = source, answer_s
        self._context = zmq.asyncio.Context()
        _open.add(self._context)
        self._live = self._socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        try:
            self._live.connect(source.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to KV events at {source.endpoint}: {error}", param="engine") from error

    @property
    def repeats(self) -> bool:
        """Return whether batches can be asked for."""
        return bool(self._source.replay)

    async def receive(self, timeout_s: float) -> Numbered | None:
        """Return the next published batch; None if none came in time. Messages of another form are dropped."""
        while await self._live.poll(int(timeout_s * 1000)):
            found = _numbered(await self._live.recv_multipart())
            if found is not None and found[0] != END:
                return found
            await asyncio.sleep(0)
        return None

    async def ask(self, start: int) -> AsyncGenerator[Numbered | None, None]:
        """Yield batches from sequence number `start` on that the engine still has; None follows a complete answer.

        The engine drops what a slow connection cannot take, also inside an answer. Each request has its
        own socket, so that a late answer is never taken for another's."""
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(self._source.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(self._answer_s):
                    found = _numbered(await socket.recv_multipart())
                if found is None:
                    continue
                if found[0] == END:
                    yield None
                    return
                yield found
        except (TimeoutError, zmq.ZMQError):
            return
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)
        _open.discard(self._context)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        if "[" in self._source.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        return socket


def _numbered(frames: list[bytes]) -> Numbered | None:
    """Return number and payload of a message: they are its last two frames, in answers of all versions, too."""
    if len(frames) < 3 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
