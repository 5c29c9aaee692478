"""Context of a client's request: id, arrival time, tenant, trace and deadline."""

from __future__ import annotations

from dataclasses import dataclass

CALL = "kvferry.call"
"""Key of the RequestContext in a request's ASGI scope."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Context of a client's request; times are seconds of this process's monotonic clock.

    id        the client's x-request-id or a random one; used in the response's header and body, in all log lines, and
              as the prefix of the request's id on the wire
    arrival   time when the request's head was read
    deadline  time by which its last token must be out
    tenant    name of the tenant; empty without tenants
    realm     tenant in whose cached blocks it may find prefixes; empty if tenants share prefixes
    priority  lower is served earlier; 0 by default
    trace     W3C `traceparent` of the request's span, or the client's if no span is recorded; may be empty
    """

    id: str
    arrival: float
    deadline: float
    tenant: str = ""
    realm: str = ""
    priority: int = 0
    trace: str = ""
