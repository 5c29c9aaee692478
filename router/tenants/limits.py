"""TenantLimiter: limits of a tenant's requests, tokens and concurrency, and OpenAI's x-ratelimit headers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvferry.protocol.errors import Overloaded
from kvferry.router.tenants.tenant import Tenant

MINUTE_S = 60.0
_NONE: Mapping[str, str] = {}


class RateLimited(Overloaded):
    """A tenant's limit is reached; `kind` is "requests" or "tokens", as in OpenAI's errors."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, kind: str, retry_after: float) -> None:
        super().__init__(f"{message}; retry in {shown_seconds(retry_after)}", retry_after=retry_after)
        self.type = kind


class Bucket:
    """Token bucket of `limit` tokens that refills continuously over one minute.

    It may be negative, since the cost of a request is known only at its end. A limit of 0 means no limit."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level, self._at = float(limit), now

    def level(self, now: float) -> float:
        """Refill the bucket and return its tokens."""
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    def until_s(self, wanted: float, now: float) -> float:
        """Return the seconds until `wanted` tokens are available, or until the bucket is full if it is less.

        A request larger than the limit takes the bucket below zero."""
        if not self.limit:
            return 0.0
        missing = min(wanted, self.limit) - self.level(now)
        return max(0.0, missing * MINUTE_S / self.limit)

    def take(self, amount: float, now: float) -> None:
        """Take tokens; a negative amount returns them."""
        if self.limit:
            self._level = self.level(now) - amount

    def resize(self, limit: int, now: float) -> None:
        """Change the limit, keeping the amount taken."""
        if limit != self.limit:
            taken = self.limit - self.level(now)
            self.limit, self._level = limit, float(limit) - taken


class TenantLimiter:
    """Limits of one tenant: requests in progress (`running`), requests per minute and tokens per minute."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        now = clock()
        self.tenant = tenant
        self.running = 0
        self._clock = clock
        self._requests = Bucket(tenant.requests_per_minute, now)
        self._tokens = Bucket(tenant.tokens_per_minute, now)

    def update(self, tenant: Tenant) -> None:
        """Apply changed limits of the tenant."""
        now = self._clock()
        self.tenant = tenant
        self._requests.resize(tenant.requests_per_minute, now)
        self._tokens.resize(tenant.tokens_per_minute, now)

    def enter(self) -> None:
        """Count a request; the caller must call `leave`. Raises RateLimited, in which case nothing is counted."""
        tenant, now = self.tenant, self._clock()
        if 0 < tenant.concurrent <= self.running:
            message = f"{self.running} requests of {tenant.name} are in progress, its limit"
            raise RateLimited(message, "requests", 1.0)
        if wait_s := self._requests.until_s(1, now):
            message = f"{tenant.name} is limited to {tenant.requests_per_minute} requests per minute"
            raise RateLimited(message, "requests", wait_s)
        if wait_s := self._tokens.until_s(1, now):
            raise self._too_few_tokens(wait_s)
        self._requests.take(1, now)
        self.running += 1

    def leave(self) -> None:
        """End a request in progress."""
        self.running -= 1

    def charge(self, tokens: int) -> None:
        """Charge a request's prompt and minimum output; raise RateLimited."""
        now = self._clock()
        if wait_s := self._tokens.until_s(tokens, now):
            raise self._too_few_tokens(wait_s, f", and this request takes {tokens}")
        self._tokens.take(tokens, now)

    def settle(self, tokens: int) -> None:
        """Charge the tokens that a request used beyond its charge."""
        self._tokens.take(tokens, self._clock())

    def headers(self) -> Mapping[str, str]:
        """Return OpenAI's `x-ratelimit-*` headers of the limits that are set."""
        if not (self._requests.limit or self._tokens.limit):
            return _NONE
        found: dict[str, str] = {}
        now = self._clock()
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.limit:
                found[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level(now))))
                found[f"x-ratelimit-reset-{kind}"] = shown_seconds(bucket.until_s(bucket.limit, now))
        return found

    def _too_few_tokens(self, wait_s: float, more: str = "") -> RateLimited:
        message = f"{self.tenant.name} is limited to {self.tenant.tokens_per_minute} tokens per minute{more}"
        return RateLimited(message, "tokens", wait_s)


def shown_seconds(seconds: float) -> str:
    """Format a duration as OpenAI does: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    return f"{int(seconds // 60)}m{int(seconds % 60)}s"
