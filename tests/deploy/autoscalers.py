"""What Kubernetes' horizontal pod autoscaler and KEDA do with the values of our queries, as they do it.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ (algorithm, tolerance, behaviour) and
https://keda.sh/docs/latest/concepts/scaling-deployments/ (activation, cooldown).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SYNC_S = 15.0
"""Between two looks of the controller at one autoscaler, in every managed cluster."""
TOLERANCE = 0.1


@dataclass(frozen=True)
class Signal:
    """A query, the value that one pod is worth, and that above which the pool is not to be at zero."""

    query: str
    target: float
    activation: float = 0.0


@dataclass(frozen=True)
class Scaled:
    """What scales one Deployment. least 0: to and from zero."""

    deployment: str
    least: int
    most: int
    signals: tuple[Signal, ...]
    behavior: Mapping[str, Any]
    cooldown_s: float = 0.0
    poll_s: float = 0.0


def of_keda(item: Mapping[str, Any]) -> Scaled:
    """A ScaledObject."""
    spec = item["spec"]
    signals = tuple(
        Signal(
            trigger["metadata"]["query"],
            float(trigger["metadata"]["threshold"]),
            float(trigger["metadata"].get("activationThreshold", 0)),
        )
        for trigger in spec["triggers"]
    )
    return Scaled(
        spec["scaleTargetRef"]["name"],
        spec["minReplicaCount"],
        spec["maxReplicaCount"],
        signals,
        spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        spec.get("cooldownPeriod", 300),
        spec["pollingInterval"],
    )


def of_hpa(item: Mapping[str, Any], queries: Mapping[str, str]) -> Scaled:
    """A HorizontalPodAutoscaler over external metrics; their queries by name."""
    spec = item["spec"]
    metrics = [metric["external"] for metric in spec["metrics"]]
    assert all(metric["target"]["type"] == "AverageValue" for metric in metrics)
    signals = (Signal(queries[m["metric"]["name"]], quantity(m["target"]["averageValue"])) for m in metrics)
    return Scaled(
        spec["scaleTargetRef"]["name"], spec["minReplicas"], spec["maxReplicas"], tuple(signals), spec["behavior"]
    )


def quantity(text: str) -> float:
    """Kubernetes' way to write numbers, as far as we use it."""
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


@dataclass
class Autoscaler:
    """One pool's. `changes`: when it was told to be what, from its beginning."""

    scaled: Scaled
    replicas: int
    changes: list[tuple[float, int]] = field(default_factory=list)
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _active_at: float = -math.inf

    def poll(self, now: float, values: Sequence[float | None]) -> None:
        """KEDA's own part: from zero, and to zero after the cooldown. A query without a value is an error: KEDA then
        leaves a pool that is not active as it is."""
        least = max(1, self.scaled.least)
        given = [(value, signal) for value, signal in zip(values, self.scaled.signals, strict=True)]
        if any(value is not None and value > signal.activation for value, signal in given):
            self._active_at = now
            if not self.replicas:
                self._become(now, least)
        elif not self.scaled.least and None not in values and now - self._active_at > self.scaled.cooldown_s:
            self._become(now, 0)

    def sync(self, now: float, values: Sequence[float | None]) -> None:
        """The autoscaler's part, from one pod on."""
        if not self.replicas:
            return
        wishes = [self._wish(v, s.target) for v, s in zip(values, self.scaled.signals, strict=True) if v is not None]
        if not wishes or (None in values and max(wishes) < self.replicas):
            return
        wish = min(max(max(wishes), self.scaled.least, 1), self.scaled.most)
        self._wishes.append((now, wish))
        up, down = (self.scaled.behavior[way] for way in ("scaleUp", "scaleDown"))
        lowest = min(w for at, w in self._wishes if at >= now - up["stabilizationWindowSeconds"])
        highest = max(w for at, w in self._wishes if at >= now - down["stabilizationWindowSeconds"])
        while self._wishes[0][0] < now - 3600:
            self._wishes.popleft()
        if lowest > self.replicas:
            limit = max(self._limit(now, policy, 1) for policy in up["policies"])
            self._become(now, min(lowest, max(limit, self.replicas)))
        elif highest < self.replicas:
            limit = min(self._limit(now, policy, -1) for policy in down["policies"])
            self._become(now, max(highest, min(limit, self.replicas)))

    def _wish(self, value: float, target: float) -> int:
        if abs(1 - value / (target * self.replicas)) <= TOLERANCE:
            return self.replicas
        return math.ceil(value / target - 1e-9)

    def _limit(self, now: float, policy: Mapping[str, Any], way: int) -> int:
        """How far the pool may go now, given how far it went within the policy's period."""
        before = self.replicas - way * sum(
            max(0, way * (after - prior)) for at, prior, after in self._steps() if at > now - policy["periodSeconds"]
        )
        if policy["type"] == "Pods":
            return before + way * int(policy["value"])
        share = before * (1 + way * policy["value"] / 100)
        return math.ceil(share) if way > 0 else math.floor(share)

    def _steps(self) -> list[tuple[float, int, int]]:
        return [(at, self.changes[i][1], after) for i, (at, after) in enumerate(self.changes[1:])]

    def _become(self, now: float, replicas: int) -> None:
        if replicas != self.replicas:
            if not self.changes:
                self.changes.append((now, self.replicas))
            self.replicas = replicas
            self.changes.append((now, replicas))

    @property
    def turns(self) -> int:
        """How often it changed its direction."""
        ways = [after > prior for _, prior, after in self._steps()]
        return sum(a != b for a, b in pairwise(ways))
