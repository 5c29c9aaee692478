"""The Grafana dashboards' queries, run without Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics
from tests.deploy.binaries import ROOT
from tests.deploy.prometheus import query

DASHBOARDS = ROOT / "deploy" / "monitoring" / "dashboards"
RATE_INTERVAL = "1m"
_METRIC = re.compile(r"\bkvferry_\w+")
_RATE = re.compile(r"\brate\(([^()\[\]]+)\[\$__rate_interval\]\)")


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query as written: still with Grafana's variables."""

    board: str
    panel: str
    expression: str
    legend: str

    def promql(self, **chosen: str) -> str:
        """What Grafana would send, with values of variables; without, of all that there is."""
        text = self.expression.replace("$__rate_interval", RATE_INTERVAL)
        for variable in ("cluster", "namespace", "model"):
            text = text.replace(f"${variable}", chosen.get(variable, ".*"))
        return text

    @property
    def totals(self) -> str:
        """The same with what was counted since the processes started in place of each rate."""
        return replace(self, expression=_RATE.sub(r"\1", self.expression)).promql()


def load() -> dict[str, dict[str, Any]]:
    """By name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panel_queries() -> list[PanelQuery]:
    """Every query of every panel of every dashboard, in order."""
    return [
        PanelQuery(name, panel["title"], target["expr"], target["legendFormat"])
        for name, board in load().items()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def panel_query(board: str, panel: str, legend: str = "") -> PanelQuery:
    """The one of that panel, with that legend where there are several."""
    (found,) = [
        item
        for item in panel_queries()
        if (item.board, item.panel) == (board, panel) and (not legend or item.legend == legend)
    ]
    return found


def failing_queries(base_url: str, boards: Container[str] | None = None) -> list[str]:
    """Queries (boards: of these dashboards alone) for which the Prometheus at `base_url` has no series or refuses an
    answer: `panel: expression`. It must
    have scraped the cluster at least twice within RATE_INTERVAL (see `wait_scraped`)."""
    failing = []
    for item in panel_queries():
        if boards is not None and item.board not in boards:
            continue
        try:
            if not query(base_url, item.promql()):
                failing.append(f"{item.panel}: {item.promql()}")
        except RuntimeError as error:
            failing.append(f"{item.panel}: {error}")
    return failing


def metric_names(expression: str) -> set[str]:
    """Our metrics that a PromQL expression names, samples like `…_bucket` as written."""
    return set(_METRIC.findall(expression))


def serving_router() -> RouterMetrics:
    """Those of a router that serves a model."""
    metrics = RouterMetrics()
    metrics.of("m")
    return metrics


def serving_node(role: str) -> WorkerMetrics:
    """Those of a node of that model."""
    metrics = WorkerMetrics(role)
    metrics.registry.model_name = "m"
    return metrics


def serving_adapter() -> WorkerMetrics:
    """Those of an adapter of that model that has found its engine."""
    metrics = serving_node("decode")
    AdapterMetrics(metrics.registry).epoch.labels("vllm 0.32.0").set(1)
    return metrics


def known_names() -> set[str]:
    """Names of all samples that some process of a cluster serves."""
    return sample_names(metrics.registry for metrics in (serving_router(), serving_adapter()))


def sample_names(registries: Iterable[CollectorRegistry]) -> set[str]:
    return {sample.name for registry in registries for family in registry.collect() for sample in family.samples}
