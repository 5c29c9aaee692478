"""AdmittedRequest: tenant limits, scheduler slot, targets and token accounting of one request that uses nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from prometheus_client import Counter

from kvferry.protocol.errors import Cancelled, KvferryError, Overloaded
from kvferry.protocol.fast_init import fast_init, replaced
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sessions import session_name
from kvferry.router.api.bodies.fields import TIER_PRIORITY, TierFields
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants.limits import RateLimited
from kvferry.router.tenants.scheduler_slots import SchedulerSlots, Size
from kvferry.router.tenants.tenant_queue import FIRST_OUTPUT, Slot
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.runtime.tracing import TRACER, Span

ADAPTED = "x-kvferry-template-adaptations"
"""Header with the rules that changed a chat's messages, so that the chat template takes them."""


@fast_init
@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request so far: of its prompts, of these from caches, and of its outputs.

    written: tokens of its prompts that were computed and may be reused.
    itl_s: mean seconds between the tokens of its slowest sequence; 0: unknown."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    itl_s: float = 0.0
    written: int = 0


class AdmittedRequest:
    """Context manager of one request that uses nodes, from its limits to the settlement of its tokens.

    Entering raises RateLimited. Inside, `turn` waits for nodes, and `began` reports the first token. The admission ends
    with the block, or at `end` after `keep_open`. Its headers show `adaptations` of messages to the chat template."""

    def __init__(
        self, call: RequestContext, tenant_registry: TenantRegistry, metrics: RouterMetrics, span: Span
    ) -> None:
        self.call = call if span.trace == call.trace else replaced(call, trace=span.trace)
        self._span = span
        self._tenant_registry, self._metrics = tenant_registry, metrics
        self._limiter = tenant_registry.limiter(call.tenant)
        self._turns: SchedulerSlots | None = None
        self._turn: Slot | None = None
        self._used: Callable[[], TokenUsage] = TokenUsage
        self._charged = 0
        self.adaptations: tuple[str, ...] = ()
        self._kept_open = self._left = False

    def __enter__(self) -> AdmittedRequest:
        self._limiter.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._left = kind is not None and issubclass(kind, Cancelled)
        if not self._kept_open:
            self.end()

    def keep_open(self) -> None:
        """Let the admission continue after its block; the caller must call `end`."""
        self._kept_open = True

    def end(self) -> None:
        """Settle the tokens used.

        A client that leaves before its first token is not refunded for its prompt, which was computed. Otherwise
        leaving in time would evade all limits."""
        used = self._used()
        self._used = lambda: used
        self._limiter.leave()
        if self.call.itl_s < inf and used.itl_s:
            self._count_target(self._metrics.itl_targets, "met" if used.itl_s <= self.call.itl_s else "missed")
        unseen = self._left and self._turn is not None and not used.prompt
        if self._charged and not unseen:
            self._limiter.settle(used.prompt + used.output - self._charged)
        if self._turns and self._turn:
            computed = self._turn.prompt if unseen else used.prompt - used.cached
            self._turns.end(self._turn, computed, used.output)
        if used.prompt or used.output:
            self._tenant_registry.count(self._metrics, self.call.tenant, (used.prompt, used.cached, used.output))

    @property
    def running(self) -> int:
        """Return the tenant's requests in progress, or 0 if there is only one tenant."""
        return self._limiter.running if self._tenant_registry.several() else 0

    def headers(self) -> Mapping[str, str]:
        """Return the rate-limit headers of the tenant, and the adaptations of the messages to the chat template."""
        found = self._limiter.headers()
        return {**found, ADAPTED: ", ".join(self.adaptations)} if self.adaptations else found

    def identify(self, call: RequestContext) -> None:
        """Take over the context of the request that this one repeats or continues."""
        self.call = replaced(call, trace=self.call.trace)

    def prefer(self, body: TierFields, *, resumes: bool = False, session: str | None = None) -> RequestContext:
        """Set the request's session, its priority among its tenant's requests, and its targets; return its context.

        session: the body's name for it, which counts if no header has one. resumes: its client has read the beginning,
        so that it has no targets."""
        call, tenant = self.call, self._limiter.tenant
        is_background = call.is_background or body.is_background
        has_targets = not (is_background or resumes)
        first_by = call.arrival + 1e-3 * tenant.ttft_ms if tenant.ttft_ms and has_targets else inf
        itl_s = 1e-3 * tenant.itl_ms if tenant.itl_ms and has_targets else inf
        tier = body.tier_used(is_background=is_background)
        priority = body.priority or call.priority or TIER_PRIORITY.get(tier, 0)
        name = call.session or session_name(call.tenant, session or "")
        if priority or tenant.ttft_ms or tenant.itl_ms or is_background or name:
            self.call = replaced(
                call, priority=priority, first_by=first_by, itl_s=itl_s, is_background=is_background, session=name
            )
        return self.call

    async def turn(self, turns: SchedulerSlots, size: Size) -> Slot:
        """Wait for a scheduler slot on the nodes.

        Raises RateLimited if the tenant's tokens are used up, and Overloaded if the slot would come too late."""
        charge = size.prompt + size.sequences * min(size.most_output, int(FIRST_OUTPUT))
        self._limiter.charge(charge)
        self._charged = charge
        span = TRACER.start("queue", self.call.trace)
        try:
            self._turn = await turns.take(self._limiter.tenant, self.call, size)
        finally:
            span.end("" if self._turn else "the queue timed out")
        self._turns = turns
        return self._turn

    def began(self, used: Callable[[], TokenUsage]) -> None:
        """Record the first token; `used` returns the tokens used, now and at the end."""
        self._used = used
        if self.call.first_by < inf:
            met = time.monotonic() <= self.call.first_by
            self._count_target(self._metrics.ttft_targets, "met" if met else "missed")
        if self._turns and self._turn:
            now = used()
            self._turns.began(self._turn, 1 - now.cached / max(1, now.prompt))

    def over(self, status: int) -> None:
        """End the request's span after its answer."""
        used = self._used()
        self._span.set_attributes(
            status=status, prompt_tokens=used.prompt, cached_tokens=used.cached, output_tokens=used.output
        )
        self._span.end("" if status < 500 else str(status))

    def refused(self, error: KvferryError) -> None:
        """Count the error if the router itself rejects the request."""
        if isinstance(error, Overloaded) and not isinstance(error, RateLimited):
            if self.call.first_by < inf:
                self._count_target(self._metrics.ttft_targets, "rejected")
            if self.call.itl_s < inf:
                self._count_target(self._metrics.itl_targets, "rejected")
        if isinstance(error, RateLimited):
            self._metrics.refused.labels("rate").inc()
        elif isinstance(error, Overloaded) and not self._turn:
            self._metrics.refused.labels("queue" if self._charged else "limit").inc()

    def _count_target(self, targets: Counter, outcome: str) -> None:
        targets.labels(self.call.tenant, outcome).inc()
