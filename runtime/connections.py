"""uvicorn protocol of one HTTP connection, with deadlines, size limits and a limit of connections per address.

A few hundred sockets that never finish a request can stop a server that waits for them without limit. This protocol
limits the time for a header, the minimum rate of a body and the time for which a client may leave a response unread.
Between two requests uvicorn's own keep-alive timeout applies. A response is never cut while its client reads it."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvferry.protocol.errors import InvalidRequest, KvferryError, SlowRequest
from kvferry.runtime.connection_counts import ConnectionCounts
from kvferry.runtime.connection_limits import MAX_HEADERS, Limits, Phase
from kvferry.runtime.http10 import without_chunks
from kvferry.runtime.ignored_upgrades import body_parser, has_body
from kvferry.runtime.rejection import MAX_DRAINED_BYTES, end, refusal
from kvferry.runtime.request_length import RequestLength
from kvferry.runtime.response_cycle import ResponseCycle, lighten
from kvferry.runtime.slow_readers import UnreadOutput

OWN_FIELDS = (
    "_active", "_address", "_began", "_begun", "_body_began", "_body_bytes", "_connection_counts", "_data", "_drained",
    "_length", "_limits", "_paced_from", "_phase", "_reader", "_reading_on", "_received_at", "_refused", "_timer",
)  # fmt: skip
"""Fields beside uvicorn's: with them, a connection has more names than CPython shares, and takes 1 KiB more."""


def guarded(limits: Limits) -> type[asyncio.Protocol]:
    """Return a protocol with these limits, and connection counts of its own, for uvicorn's `http=`."""
    counts = ConnectionCounts(limits.per_address, limit=limits.connections)
    return cast("type[asyncio.Protocol]", partial(GuardedProtocol, limits=limits, connection_counts=counts))


class GuardedProtocol(HttpToolsProtocol):
    """Implements `uvicorn.protocols.http.httptools_impl.HttpToolsProtocol` with limits and one phase timer."""

    __slots__ = OWN_FIELDS

    def __init__(self, *args: Any, limits: Limits, connection_counts: ConnectionCounts, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits, self._connection_counts, self._phase = limits, connection_counts, Phase.BETWEEN
        self._address: str | None = None
        self._active: ResponseCycle | None = None
        self._begun = self._reading_on = self._refused = False
        self._length, self._data, self._body_bytes, self._drained = RequestLength(limits.body_bytes), b"", 0, 0
        self._received_at = self._began = self._body_began = self._paced_from = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reader: UnreadOutput | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        lighten(self)
        self._reader = UnreadOutput(transport, self.loop, self._limits.reader_s, self._limits.min_rate)
        if self.client is not None:
            self._address = self.client[0]
            if crowd := self._connection_counts.enter(self._address):
                return self._refuse(crowd)
        self._enter_header()
        self._set_timer()

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
            self._drained += len(data)
            if self._drained > MAX_DRAINED_BYTES:
                self.transport.close()
            return
        if self._phase is Phase.BETWEEN:
            self._enter_header()
        self._received_at, self._began = self.loop.time(), time.perf_counter()
        self._length.received, self._data = self._length.received + len(data), data
        super().data_received(data)
        self._data = b""
        if not self._refused:
            self._check_length()
        if self._timer is None and not self._refused:  # most requests arrive at once and need no deadline
            self._set_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is Phase.BETWEEN:
            self._enter_header()
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.BODY:
            return self._check(self._length.trailer_fault())
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._check(self._length.count_fault())

    def on_headers_complete(self) -> None:
        self._check(self._length.header_fault(self.url, self.headers, len(self.pipeline)))
        super().on_headers_complete()
        self._phase, self._body_bytes = Phase.BODY, 0
        self._body_began = self._paced_from = self.loop.time()
        self._stop_timer()

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
            # The response ended before the body, whose later bytes stopped the keep-alive timer of the response.
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
        """Answer the request as usual, as the connection's last; the parser's exception has the header's end."""
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
        """Return whether the parser reports a request as complete without having read its body."""
        return self.parser.should_upgrade() and not self._reading_on and has_body(self.headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = ResponseCycle.of(cycle)
        super()._start_asgi_task(cycle, without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    @property
    def _answering(self) -> bool:
        return self._active is not None and not self._active.response_complete

    def _enter_header(self) -> None:
        self._phase, self._begun = Phase.HEADER, False
        self._length.begin()
        self._unset_keepalive_if_required()

    def _set_timer(self) -> None:
        if self._phase is Phase.BODY:
            self._watch_body()
        elif self._phase is Phase.HEADER and self._limits.header_s:
            self._timer = self.loop.call_later(self._limits.header_s, self._header_late)

    def _header_late(self) -> None:
        if self._answering:
            self._timer = self.loop.call_later(self._limits.header_s, self._header_late)  # begins after the response
        elif self._begun:
            self._refuse(SlowRequest(f"the request's header did not arrive within {self._limits.header_s:g} s"))
        else:
            self.transport.close()

    def _watch_body(self) -> None:
        """Check the body's progress, and again when it may be late. Time while reading is paused does not count."""
        if not self._limits.body_s:
            return
        now = self.loop.time()
        if self.flow.read_paused:
            self._received_at, self._paced_from, self._body_bytes = now, now, 0
        due = self._received_at + self._limits.body_s
        if self._limits.request_s:
            due = min(due, self._body_began + self._limits.request_s)
        required = self._limits.min_rate * (now - self._paced_from - self._limits.body_s)
        if now < due and self._body_bytes >= required:
            self._timer = self.loop.call_at(due, self._watch_body)
        else:
            self._refuse(SlowRequest("the request's body did not arrive in time"))

    def _check_length(self) -> None:
        found = {Phase.HEADER: self._length.begun_header_fault, Phase.BODY: self._length.body_fault}.get(self._phase)
        if found and (fault := found()):
            self._fail(fault)

    def _check(self, fault: KvferryError | None) -> None:
        """Reject a faulty request from inside a parser callback. Raises HttpParserError, which stops the parser."""
        if fault:
            self._fail(fault)
            raise httptools.HttpParserError

    def _fail(self, error: KvferryError) -> None:
        """Reject a malformed request after the throttle's delay; loop.time() does not advance within a callback."""
        took_s = time.perf_counter() - self._began
        self._refuse(error, self._connection_counts.delay_s(self._address or "", took_s), linger=True)

    def _refuse(self, error: KvferryError, after_s: float = 0.0, *, linger: bool = False) -> None:
        """Send the error, unless another response has begun, and close without waiting for the peer to read it."""
        self._stop_timer()
        last = refusal(error) if self._may_answer() else b""
        self._refused = True
        self.pipeline.clear()
        self._disconnect()
        self._timer = end(self.transport, self.loop, last, after_s, linger=linger)

    def _may_answer(self) -> bool:
        reads_body = self._phase is Phase.BODY
        return self.cycle is self._active and not self.cycle.response_started if reads_body else not self._answering

    def _disconnect(self) -> None:
        """Notify the active request of the disconnect; uvicorn notifies only a connection's newest request."""
        if self._active is not None and self._answering:
            self._active.leave()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
