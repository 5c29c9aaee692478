"""TenantRegistry: all tenants by name, with their limits, token counters and cache namespaces."""

from __future__ import annotations

from prometheus_client import Counter

from kvferry.protocol.labels import TOKEN_KINDS
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.tenants.keyring import Keyring
from kvferry.router.tenants.limits import TenantLimiter
from kvferry.router.tenants.tenant import NOBODY, Tenant


class TenantRegistry:
    """Tenants of a router; the caller follows the file of `keyring`.

    A tenant's limiter is kept while the tenant exists or has a request in progress."""

    def __init__(self, settings: RouterSettings, keyring: Keyring | None = None) -> None:
        self.keyring = keyring or Keyring(settings)
        self._share_prefixes = settings.share_prefixes
        self._limiters: dict[str, TenantLimiter] = {}
        self._known = self.keyring.tenants
        self._counters: dict[str, list[Counter]] = {}

    def several(self) -> bool:
        """Return whether there are several tenants, among which queueing must be fair."""
        return len(self.keyring.tenants) > 1

    def tenant(self, name: str) -> Tenant:
        """Return the tenant with its current limits."""
        return self.keyring.tenants.get(name) or (NOBODY if not name else Tenant(name))

    def exists(self, name: str) -> bool:
        """Return whether the tenant has a key, or no client needs one."""
        return name in self.keyring.tenants

    def limiter(self, name: str) -> TenantLimiter:
        """Return the tenant's limiter."""
        if self._known is not self.keyring.tenants:
            self._renew()
        limiter = self._limiters.get(name)
        if limiter is None:
            limiter = self._limiters[name] = TenantLimiter(self.tenant(name))
        return limiter

    def realm(self, name: str) -> str:
        """Return the tenant whose cached blocks this tenant may use.

        It is the tenant itself, so that no tenant detects another's prompts by latency, unless all share prefixes."""
        return "" if self._share_prefixes else name

    def count(self, metrics: RouterMetrics, name: str, tokens: tuple[int, int, int]) -> None:
        """Count a request's prompt, cached and output tokens, with cached counters, since label lookups are slow."""
        counters = self._counters.get(name)
        if counters is None:
            counters = self._counters[name] = [metrics.tenant_tokens.labels(name, kind) for kind in TOKEN_KINDS]
        for counter, amount in zip(counters, tokens, strict=True):
            if amount:
                counter.inc(amount)

    def _renew(self) -> None:
        """Apply a changed keys file to the limiters."""
        self._known = self.keyring.tenants
        for name, limiter in list(self._limiters.items()):
            if name in self._known:
                limiter.update(self._known[name])
            elif not limiter.running:
                del self._limiters[name]
