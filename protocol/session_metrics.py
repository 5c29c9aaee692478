"""Worker metrics of client sessions whose blocks the pool holds: paused, returned and evicted."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvferry.protocol.labels import IDLE_KINDS, SESSION_RETURNS
from kvferry.protocol.model_metrics import ModelRegistry


class SessionMetrics:
    """Session metrics of a worker.

    paused: paused sessions with blocks of their own in the pool. returns: by outcome. evicted: blocks by kind."""

    def __init__(self, role: str, registry: ModelRegistry) -> None:
        returns = registry.family(
            Counter,
            "kvferry_session_returns",
            "Requests that continued an earlier session, by what was in the pool: kept (all of its blocks), "
            "partial, lost (none of its own blocks).",
            ["role", "outcome"],
        )
        evicted = registry.family(
            Counter,
            "kvferry_idle_blocks_evicted",
            "Cached blocks evicted, by what they were: paused (of a session), shared (by several), copied (not used by "
            "a request so far), closed (of a closed session).",
            ["role", "kind"],
        )
        self.returns = {value: returns.labels(role, value) for value in SESSION_RETURNS}
        self.evicted = {value: evicted.labels(role, value) for value in IDLE_KINDS}
        self.paused = registry.family(
            Gauge, "kvferry_sessions_paused", "Paused sessions with blocks of their own in the pool.", ["role"]
        ).labels(role)
