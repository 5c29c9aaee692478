"""Autoscalers over pools in simulated time: what they show goes into a real Prometheus, which is asked as
the manifests ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import yaml

from tests.deploy.autoscalers import SYNC_S, Autoscaler, Scaled, of_hpa, of_keda
from tests.deploy.binaries import ROOT
from tests.deploy.pools import TICK_S, Pools
from tests.deploy.prometheus import running_prometheus
from tests.deploy.remote_write import write

SCRAPE_S = 5.0
"""Between two scrapes; deploy/scaling.md asks for it."""
NAMESPACE = 'namespace="kvferry"'
ROLES = ("prefill", "decode")


def keda() -> dict[str, Scaled]:
    """What the ScaledObjects say, by Deployment without its prefix."""
    path = ROOT / "deploy" / "k8s" / "components" / "keda" / "scaledobjects.yaml"
    found = (of_keda(item) for item in yaml.safe_load_all(path.read_text()))
    return {scaled.deployment.removeprefix("kvferry-"): scaled for scaled in found}


def hpa() -> dict[str, Scaled]:
    """What the HorizontalPodAutoscalers and the adapter's rules say together."""
    base = (ROOT / "deploy" / "k8s" / "base" / "autoscaling.yaml").read_text()
    found = (of_hpa(item, adapter_queries()) for item in yaml.safe_load_all(base))
    return {scaled.deployment.removeprefix("kvferry-"): scaled for scaled in found}


def adapter_queries() -> dict[str, str]:
    """What the adapter asks for a metric of the namespace, by the metric's name."""
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus-adapter.yaml").read_text())["externalRules"]
    return {rule["name"]["as"]: rule["metricsQuery"].replace("<<.LabelMatchers>>", NAMESPACE) for rule in rules}


@dataclass
class Trial:
    """Pools, what scales them, and requests: called each tick, `load` lets come what comes. Seconds are from the
    trial's beginning. scrape_at, sync_at: the phases of scrapes and of the controller, which looks on from `since`."""

    pools: Pools
    scalers: Mapping[str, Scaled]
    load: Callable[[Pools, float], None]
    scrape_at: float = 0.0
    sync_at: float = 0.0
    since: float = 0.0
    scaling: dict[str, Autoscaler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role in ROLES:
            self.scaling[role] = Autoscaler(self.scalers[role], len(self.pools.pods[role]))

    def due(self, seconds: float) -> tuple[bool, bool]:
        """Whether KEDA polls now, and whether the controller syncs."""
        poll_s = self.scalers["decode"].poll_s
        if seconds < self.since:
            return False, False
        return poll_s > 0 and (seconds - self.sync_at) % poll_s == 0, (seconds - self.sync_at) % SYNC_S == 0


class Clock:
    """A Prometheus whose time is ours. Trials follow each other: nothing may be written into its past."""

    def __init__(self, url: str) -> None:
        self._url, self._client = url, httpx.Client(trust_env=False, timeout=60)
        self.now = float(round(time.time()) - 12 * 3600) // 60 * 60

    def run(self, trials: Sequence[Trial], seconds: float) -> None:
        """All of them at once, each in its own namespace."""
        began = self.now
        while self.now - began < seconds:
            passed = self.now - began
            self._tick(trials, passed)
            self.now += TICK_S

    def values(self, queries: Sequence[str]) -> list[float | None]:
        """As one question; None: no series, or several."""
        parts = [f'label_replace({query}, "query", "{n}", "", "")' for n, query in enumerate(queries)]
        data = {"query": " or ".join(parts), "time": str(self.now)}
        answer = self._client.post(f"{self._url}/api/v1/query", data=data).json()
        assert answer["status"] == "success", answer
        found: dict[str, list[float]] = {}
        for each in answer["data"]["result"]:
            found.setdefault(each["metric"]["query"], []).append(float(each["value"][1]))
        return [got[0] if len(got := found.get(str(n), [])) == 1 else None for n in range(len(queries))]

    def _tick(self, trials: Sequence[Trial], passed: float) -> None:
        samples = {}
        for trial in trials:
            trial.load(trial.pools, passed)
            trial.pools.tick()
            if (passed - trial.scrape_at) % SCRAPE_S == 0:
                samples |= trial.pools.metrics()
        if samples:
            write(self._client, self._url, self.now, samples)
        asked = [(trial, role) for trial in trials if any(trial.due(passed)) for role in ROLES]
        queries = [
            (trial, role, signal.query.replace(NAMESPACE, f'namespace="{trial.pools.namespace}"'))
            for trial, role in asked
            for signal in trial.scalers[role].signals
        ]
        values = self.values([query for _, _, query in queries]) if queries else []
        for trial, role in asked:
            own = [v for (t, r, _), v in zip(queries, values, strict=True) if t is trial and r == role]
            self._act(trial, role, own, passed)

    def _act(self, trial: Trial, role: str, values: Sequence[float | None], passed: float) -> None:
        scaling, (polls, syncs) = trial.scaling[role], trial.due(passed)
        if polls:
            scaling.poll(passed, values)
        if syncs:
            scaling.sync(passed, values)
        trial.pools.scale(role, scaling.replicas)


@contextmanager
def clock() -> Iterator[Clock]:
    with running_prometheus([]) as url:
        yield Clock(url)
