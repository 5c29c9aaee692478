"""RegistryHealth: whether the registry answers this router, with logs and a metric."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvferry.protocol.errors import RegistryRefuses
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger(__name__)


class RegistryHealth:
    """Health of the router's connection to the registry.

    up        true if the registry answered the last read
    trouble   reason why it has never answered; empty once it has
    failures  consecutive reads without an answer

    Logs one line per outage, or one every ten seconds while the registry refuses this router, which an operator must
    fix."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.up, self.failures = False, 0
        self.trouble = "the registry has not been queried yet"
        self._metrics, self._clock = metrics, clock
        self._answered_at = clock()
        self._refused = RateLimitedLog(log)

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last answer."""
        return self._clock() - self._answered_at

    def answered(self) -> None:
        """Record an answer."""
        if self.failures:
            log.info("registry answers again")
        self.up, self.failures, self.trouble, self._answered_at = True, 0, "", self._clock()
        self._metrics.registry_up.set(1)

    def failed(self, error: Exception, known: int) -> None:
        """Record a read without an answer, during which `known` nodes are kept."""
        if isinstance(error, RegistryRefuses):
            self._refused.warning("registry refuses this router, keeping %d nodes: %s", known, error)
        elif not self.failures:
            log.warning("registry does not answer, keeping %d nodes: %r", known, error)
        self.up, self.failures = False, self.failures + 1
        if self.trouble:
            self.trouble = f"{error}" or "no answer in time"
        self._metrics.registry_up.set(0)
