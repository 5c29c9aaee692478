"""Latency targets and fairness id of a request, from headers of the Gateway API Inference Extension or llm-d.

Each header has two spellings: the extension's and llm-d's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from starlette.datastructures import Headers

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.fast_init import replaced
from kvferry.router.request_context import RequestContext

TTFT = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
"""Headers of the target of the time to the first token, in milliseconds."""
ITL = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
"""Headers of the target of the mean time between tokens, in milliseconds."""
FLOW = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
"""Headers that name the flow of requests among which a tenant's turns are shared."""
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives that a request's headers name; targets in seconds, None without one.

    flow  its name; empty: none"""

    ttft_s: float | None
    itl_s: float | None
    flow: str

    @classmethod
    def of(cls, headers: Headers) -> Objectives:
        """Read the headers; raise InvalidRequest for a target that is no number of milliseconds."""
        return cls(_seconds(headers, TTFT), _seconds(headers, ITL), _given(headers, FLOW)[1])

    def applied(self, call: RequestContext) -> RequestContext:
        """Return the context with these targets in place of the tenant's, unless nobody waits for the request."""
        if call.is_background:
            return call
        first_by = call.first_by if self.ttft_s is None else call.arrival + self.ttft_s
        return replaced(call, first_by=first_by, itl_s=call.itl_s if self.itl_s is None else self.itl_s)


def _given(headers: Headers, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the first of these headers that the request has, and its value; empty texts if it has none."""
    return next(((name, headers[name].strip()) for name in names if name in headers), ("", ""))


def _seconds(headers: Headers, names: tuple[str, ...]) -> float | None:
    """Return a target in seconds; 0 removes the tenant's."""
    name, text = _given(headers, names)
    if not name:
        return None
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{name} must be a number of milliseconds, got {text[:40]!r}", param=name)
    return 1e-3 * float(text) or inf
