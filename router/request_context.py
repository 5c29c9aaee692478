"""Context of a client's request: id, arrival time, tenant, trace and deadline."""

from __future__ import annotations

from dataclasses import dataclass

CALL = "kvferry.call"
"""Its key in a request's ASGI scope."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Plain data; times are seconds of this process's monotonic clock.

    id        the client's x-request-id, or one that was drawn: the same in the response's header, in its body, in every
              log line, and at the beginning of the request's name on the wire
    arrival   when the request's head was read
    deadline  when its last token must be out
    tenant    who asks; the empty string while there is one key for all
    realm     whose cached blocks it may use: its tenant's, or the empty string where prefixes are shared
    priority  lower is served earlier; 0 for all that say nothing
    trace     W3C `traceparent` of the request's span, or of the client's where none is recorded; empty without either
    """

    id: str
    arrival: float
    deadline: float
    tenant: str = ""
    realm: str = ""
    priority: int = 0
    trace: str = ""
