"""RouterServices: a router's node table, client, budgets and logs, which the clusters of all its models share."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.router.dispatch.canary_release import CanaryRelease
from kvferry.router.dispatch.poison_requests import PoisonRequests
from kvferry.router.dispatch.prefixes import Prefixes
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.dispatch.timers import Spacing
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.nodes.session_notes import SessionNoter
from kvferry.router.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class RouterServices:
    """State that all models' clusters share; owned by `RouterCluster`, which documents the fields."""

    nodes: NodeTable
    client: NodeClient
    prefixes: Prefixes
    background_calls: BackgroundCalls
    metrics: RouterMetrics
    local_tokens: int
    buddies: bool
    fetch: bool
    max_wait_s: float
    deaths: PoisonRequests
    retries: RetryBudget
    hedges: RetryBudget
    looks: Spacing
    request_log: RequestLog
    session_notes: SessionNoter
    canary: CanaryRelease | None = None
