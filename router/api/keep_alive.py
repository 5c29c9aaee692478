"""KeepAlive: writes comments into quiet resumable streams, so that clients can tell a dead router from a busy cluster.

A client that hears nothing for a second may go to another router: a living one would have written a comment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextvars import Context

from starlette.types import Message

from kvferry.router.api.responder import Responder
from kvferry.runtime.eager_start import start_eagerly

KEEP_ALIVE_S = 0.4
"""Silence of a stream after which a comment is written, in seconds."""
CHECK_S = 0.1
"""Seconds between two checks of all streams."""


class KeepAlive:
    """Writes comments into the quiet streams of one router, with one timer for all of them."""

    def __init__(self) -> None:
        self._streams: dict[KeptStream, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def kept(self, responder: Responder) -> Iterator[None]:
        """Keep the responder's stream alive within the block.

        If nothing is sent for KEEP_ALIVE_S, the response begins with status 200, and later errors are its last event.
        """
        stream = KeptStream(responder)
        self._streams[stream] = None
        if self._timer is None:
            self._arm()
        try:
            yield
        finally:
            del self._streams[stream]
            stream.close()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check, context=Context())

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        for stream in list(self._streams):
            stream.fill_silence(now)
        if self._streams:
            self._arm()


class KeptStream:
    """A responder's stream whose messages pass through here, until `close`."""

    def __init__(self, responder: Responder) -> None:
        self._responder, self._send = responder, responder.send
        self._sent_at, self._sending = time.monotonic(), 0
        responder.send = self._pass

    def close(self) -> None:
        """Let the responder send by itself again."""
        self._responder.send = self._send

    def fill_silence(self, now: float) -> None:
        """Write a comment if the stream is quiet. A client that has not read what was sent needs none."""
        if self._sending or now - self._sent_at < KEEP_ALIVE_S:
            return
        try:
            rest = start_eagerly(self._responder.keep_alive())
        except Exception:
            return  # the client has left, which its request notices itself
        if rest is not None:
            rest.close()  # it would wait for a client that does not read

    async def _pass(self, message: Message) -> None:
        self._sending += 1
        try:
            await self._send(message)
        finally:
            self._sending -= 1
            self._sent_at = time.monotonic()
