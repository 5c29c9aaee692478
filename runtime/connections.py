"""uvicorn protocol with deadlines, size bounds and a connection cap per address.

A server that waits for anyone who connected can be stopped by a few hundred sockets that never finish a request. Here a
header must be whole in time, a body must keep coming at a least pace, and an answer must be taken. Between two requests
of a connection uvicorn's own keep-alive timeout holds; an answer under way is never cut while its reader reads.
"""

from __future__ import annotations

import asyncio
import sys
import time
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvferry.protocol.errors import InvalidRequest, KvferryError, SlowRequest
from kvferry.runtime.connection_counts import ConnectionCounts
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.http10 import without_chunks
from kvferry.runtime.ignored_upgrades import body_parser, has_body
from kvferry.runtime.rejection import end, refusal
from kvferry.runtime.request_length import RequestLength
from kvferry.runtime.slow_readers import UnreadOutput


class Phase(Enum):
    """Part of a request to which a connection's next byte belongs.

    The answer to an earlier request may be under way in any of them."""

    BETWEEN = auto()
    HEADER = auto()
    BODY = auto()


def guarded(limits: Limits) -> type[asyncio.Protocol]:
    """Return a protocol with these limits for uvicorn's `http=`.

    Addresses are counted per call of this."""
    connection_counts = ConnectionCounts(limits.per_address)
    return cast("type[asyncio.Protocol]", partial(GuardedProtocol, limits=limits, connection_counts=connection_counts))


class GuardedProtocol(HttpToolsProtocol):
    """One connection. One timer serves the phase it is in."""

    def __init__(self, *args: Any, limits: Limits, connection_counts: ConnectionCounts, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits, self._connection_counts = limits, connection_counts
        self._address: str | None = None
        self._phase = Phase.BETWEEN
        self._active: RequestResponseCycle | None = None
        self._begun = self._reading_on = self._refused = False
        self._length = RequestLength(limits.body_bytes)
        self._data, self._body_bytes = b"", 0
        self._heard = self._began = self._body_began = self._paced_from = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reader: UnreadOutput | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reader = UnreadOutput(transport, self.loop, self._limits.reader_s, self._limits.least_rate)
        if self.client is not None:
            self._address = self.client[0]
            if crowd := self._connection_counts.enter(self._address):
                return self._refuse(crowd)
        self._enter_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._connection_counts.leaves(self._address)
            self._address = None
        self._stop_timer()
        self.resume_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._disconnect()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._phase is Phase.BETWEEN:
            self._enter_header()
        self._heard, self._began = self.loop.time(), time.perf_counter()
        self._length.received += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if not self._refused:
            self._check_length()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is Phase.BETWEEN:
            self._enter_header()
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.BODY:
            self._check(self._length.trailer_fault())
        else:
            super().on_header(name, value)
            self._check(self._length.count_fault(self.headers))

    def on_headers_complete(self) -> None:
        self._check(self._length.header_fault(self.url, self.headers, len(self.pipeline)))
        super().on_headers_complete()
        self._phase, self._body_bytes = Phase.BODY, 0
        self._body_began = self._paced_from = self.loop.time()
        self._stop_timer()
        self._watch_body()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._length.body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_unread():
            return
        self._phase = Phase.BETWEEN
        self._stop_timer()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # The answer came before the body's end, which stopped the keep-alive timer that the answer had started.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is not Phase.BETWEEN:
            self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader:
            self._reader.stalled()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader:
            self._reader.flows()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._fail(InvalidRequest("this is not an HTTP/1.1 request"))

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as any, and is the last one. The parser's complaint tells where the header ended."""
        self.cycle.keep_alive = False
        if not self._body_unread():
            return
        end = cast(httptools.HttpParserUpgrade, sys.exception()).args[0]
        self._reading_on = True
        self.parser = body_parser(self.headers, self)
        try:
            self.parser.feed_data(self._data[end:])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _body_unread(self) -> bool:
        """Return whether the parser calls a request complete whose body it has not looked at."""
        return self.parser.should_upgrade() and not self._reading_on and has_body(self.headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    @property
    def _answering(self) -> bool:
        return self._active is not None and not self._active.response_complete

    def _enter_header(self) -> None:
        self._phase, self._begun = Phase.HEADER, False
        self._length.begin()
        self._unset_keepalive_if_required()
        if self._limits.header_s:
            self._timer = self.loop.call_later(self._limits.header_s, self._header_late)

    def _header_late(self) -> None:
        if self._answering:
            # A request sent ahead of its time has until the answer is out, and then as long as any other.
            self._timer = self.loop.call_later(self._limits.header_s, self._header_late)
        elif self._begun:
            self._refuse(SlowRequest(f"the request's header did not arrive within {self._limits.header_s:g} s"))
        else:
            self.transport.close()

    def _watch_body(self) -> None:
        """Look at the body's progress, again when it may be late. One that nobody reads here just now is not."""
        if not self._limits.body_s:
            return
        now = self.loop.time()
        if self.flow.read_paused:
            self._heard, self._paced_from, self._body_bytes = now, now, 0
        due = self._heard + self._limits.body_s
        if self._limits.request_s:
            due = min(due, self._body_began + self._limits.request_s)
        owed = self._limits.least_rate * (now - self._paced_from - self._limits.body_s)
        if now < due and self._body_bytes >= owed:
            self._timer = self.loop.call_at(due, self._watch_body)
        else:
            self._refuse(SlowRequest("the request's body did not arrive in time"))

    def _check_length(self) -> None:
        found = {Phase.HEADER: self._length.begun_header_fault, Phase.BODY: self._length.body_fault}.get(self._phase)
        if found and (fault := found()):
            self._fail(fault)

    def _check(self, fault: KvferryError | None) -> None:
        """Within the parser, which is to stop where something is at fault."""
        if fault:
            self._fail(fault)
            raise httptools.HttpParserError

    def _fail(self, error: KvferryError) -> None:
        """What has come is at fault, which is paid for. The loop's own clock stands still meanwhile."""
        self._refuse(error, self._connection_counts.delay_s(self._address or "", time.perf_counter() - self._began))

    def _refuse(self, error: KvferryError, after_s: float = 0.0) -> None:
        """Say why, where no other answer has begun, and close. Nothing is waited for: the peer may not read."""
        self._stop_timer()
        last = refusal(error) if self._may_answer() else b""
        self._refused = True
        self.pipeline.clear()
        self._disconnect()
        self._timer = end(self.transport, self.loop, last, after_s)

    def _may_answer(self) -> bool:
        if self._phase is Phase.BODY:
            return self.cycle is self._active and not self.cycle.response_started
        return not self._answering

    def _disconnect(self) -> None:
        """Tell anyone who answers that the client is gone. uvicorn tells the newest request of a connection only."""
        if self._active is not None and self._answering:
            self._active.disconnected = True
            self._active.message_event.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
