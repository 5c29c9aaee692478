"""Tenant: its name, limits, priority class, share of the nodes and latency targets."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Valid tenant names, which appear unescaped in logs, labels and headers."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant with its limits, which apply per router; 0 means no limit.

    requests_per_minute  rate of requests
    tokens_per_minute    rate of prompt and output tokens together
    concurrent           generating requests in progress
    priority             class; higher numbers wait as long as a tenant of a lower number waits
    share                weight in the fair queue among tenants of its class
    ttft_ms              target of the time to first token in milliseconds, for requests whose client waits; 0: none
    itl_ms               target of the mean time between a stream's tokens in milliseconds, for the same requests
    """

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    priority: int = 0
    share: float = 1.0
    ttft_ms: int = 0
    itl_ms: int = 0


NOBODY = Tenant("")
"""Tenant of all clients of a router without keys, or with the single key of its settings."""
