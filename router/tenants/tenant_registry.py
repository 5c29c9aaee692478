"""All tenants: identifies a request's tenant, its limits and its cache namespace."""

from __future__ import annotations

from prometheus_client import Counter

from kvferry.protocol.labels import TOKEN_KINDS
from kvferry.protocol.metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.tenants.keyring import Keyring
from kvferry.router.tenants.limits import Meter
from kvferry.router.tenants.tenant import NOBODY, Tenant


class TenantRegistry:
    """`keyring` is the caller's to keep up with its file.

    Meters are kept for as long as there is a tenant of the name, or a request of it in progress."""

    def __init__(self, settings: RouterSettings, keyring: Keyring | None = None) -> None:
        self.keyring = keyring or Keyring(settings)
        self._share_prefixes = settings.share_prefixes
        self._meters: dict[str, Meter] = {}
        self._known = self.keyring.tenants
        self._counters: dict[str, list[Counter]] = {}

    def several(self) -> bool:
        """Return whether there is anyone to be fair to."""
        return len(self.keyring.tenants) > 1

    def tenant(self, name: str) -> Tenant:
        """Return the tenant as the file has it now."""
        return self.keyring.tenants.get(name) or (NOBODY if not name else Tenant(name))

    def meter(self, name: str) -> Meter:
        if self._known is not self.keyring.tenants:
            self._renew()
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = Meter(self.tenant(name))
        return meter

    def realm(self, name: str) -> str:
        """Return whose cached blocks a tenant may use.

        They are its own alone, unless all share prefixes, so that nobody can probe for others' prompts by latency."""
        return "" if self._share_prefixes else name

    def count(self, metrics: RouterMetrics, name: str, tokens: tuple[int, int, int]) -> None:
        """Prompt, cached and output tokens of a request that ended. To look a label up costs more than to count."""
        counters = self._counters.get(name)
        if counters is None:
            counters = self._counters[name] = [metrics.tenant_tokens.labels(name, kind) for kind in TOKEN_KINDS]
        for counter, amount in zip(counters, tokens, strict=True):
            if amount:
                counter.inc(amount)

    def _renew(self) -> None:
        """The file changed."""
        self._known = self.keyring.tenants
        for name, meter in list(self._meters.items()):
            if name in self._known:
                meter.become(self._known[name])
            elif not meter.running:
                del self._meters[name]
