"""The Grafana dashboard's queries, run without Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from protocol.metrics import RouterMetrics, WorkerMetrics
from tests.deploy.binaries import ROOT
from tests.deploy.prometheus import query

DASHBOARD = ROOT / "deploy" / "monitoring" / "dashboard.json"
RATE_INTERVAL = "1m"
_METRIC = re.compile(r"\bkvferry_\w+")


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query as written: still with Grafana's variables."""

    panel: str
    expression: str
    legend: str

    @property
    def promql(self) -> str:
        """What Grafana would send."""
        return self.expression.replace("$__rate_interval", RATE_INTERVAL)


def load() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return dashboard


def panel_queries() -> list[PanelQuery]:
    """Every query of every panel, in order."""
    return [
        PanelQuery(panel["title"], target["expr"], target["legendFormat"])
        for panel in load()["panels"]
        for target in panel.get("targets", ())
    ]


def failing_queries(base_url: str) -> list[str]:
    """Queries for which the Prometheus at `base_url` has no series or refuses an answer: `panel: expression`. It must
    have scraped the cluster at least twice within RATE_INTERVAL (see `wait_scraped`)."""
    failing = []
    for item in panel_queries():
        try:
            if not query(base_url, item.promql):
                failing.append(f"{item.panel}: {item.promql}")
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


def known_names() -> set[str]:
    """Names of all samples that some process of a cluster serves."""
    return sample_names(metrics.registry for metrics in (serving_router(), WorkerMetrics("decode")))


def sample_names(registries: Iterable[CollectorRegistry]) -> set[str]:
    return {sample.name for registry in registries for family in registry.collect() for sample in family.samples}
