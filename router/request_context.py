"""RequestContext of a client's request (id, tenant, deadline, targets, trace), and its identity when resumed."""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from math import inf

from kvferry.protocol.fast_init import fast_init

CALL = "kvferry.call"
"""Key of the RequestContext in a request's ASGI scope."""


@fast_init
@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Values on which an answer's ids, times and tokens depend besides the request's body.

    A request that another router continues has the same identity, and therefore the same answer.

    nonce    hexadecimal digits that distinguish requests of the same id
    created  seconds since 1970
    seed     seed of sampling, where the body gives none
    """

    nonce: str
    created: int
    seed: int

    @classmethod
    def new(cls) -> RequestIdentity:
        """Return the identity of a new request."""
        return cls(secrets.token_hex(4), int(time.time()), random.getrandbits(63))


@dataclass(frozen=True, slots=True)
class ResumeHeaders:
    """Headers of a request with which clients resume streams.

    key        `Idempotency-Key`; empty: none
    after      `Last-Event-ID`; empty: from the beginning
    reads_ids  the client reads event ids: it sent one of these two headers, or accepts text/event-stream
    name       id of the answer, from the path of a GET; empty: of the request's body
    number     number of the last event that a client of the Responses API has; -1: none
    streams    the answer is streamed, whatever the body asks
    """

    key: str = ""
    after: str = ""
    reads_ids: bool = False
    name: str = ""
    number: int = -1
    streams: bool = False


NO_RESUME = ResumeHeaders()
"""Headers of a client that resumes nothing."""


@fast_init
@dataclass(frozen=True, slots=True)
class RequestContext:
    """Context of a client's request; times are seconds of this process's monotonic clock.

    id        the client's x-request-id or a random one; used in the response's header and body, in all log lines, and
              as the prefix of the request's id on the wire
    arrival   time when the request's head was read
    deadline  time by which its last token must be sent
    first_by  time by which its first token must be sent; infinite without a target of the tenant
    tenant    name of the tenant; empty without tenants
    realm     tenant in whose cached blocks it may find prefixes; empty if tenants share prefixes
    priority  lower is served earlier; 0 by default
    itl_s     target of the mean seconds between its tokens; infinite without a target of the tenant
    is_background  nobody waits for it (for example a batch row), so that no targets apply to it
    session   name of the session on the wire, by the client's x-session-id; empty: none
    trace     W3C `traceparent` of the request's span, or the client's if no span is recorded; may be empty
    """

    id: str
    arrival: float
    deadline: float
    tenant: str = ""
    realm: str = ""
    priority: int = 0
    trace: str = ""
    identity: RequestIdentity = field(default_factory=RequestIdentity.new)
    resume: ResumeHeaders = NO_RESUME
    first_by: float = inf
    itl_s: float = inf
    is_background: bool = False
    session: str = ""

    @property
    def has_targets(self) -> bool:
        """Return whether targets of its tenant apply to it."""
        return self.first_by < inf or self.itl_s < inf


def drawn_seed(call: RequestContext, request_id: str) -> int:
    """Return the seed of one of a call's requests whose body gives none; it differs for each prompt."""
    seed = call.identity.seed
    return seed if request_id == call.id else random.Random(f"{seed} {request_id}").getrandbits(63)  # noqa: S311


def request_names(call: RequestContext, prompts: int) -> list[str]:
    """Return the ids of the requests that a call with `prompts` prompts makes."""
    return [call.id] if prompts == 1 else [f"{call.id}-p{number}" for number in range(prompts)]
