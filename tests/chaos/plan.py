"""Which faults happen when: a function of the seed, so that a run can be repeated but for what the machine adds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PREFILLS, DECODES, ROUTERS = ("prefill-0", "prefill-1"), ("decode-0", "decode-1"), ("router-0", "router-1")
NODES, ENGINES = (*PREFILLS, *DECODES), ("engine-0", "engine-1")


@dataclass(frozen=True, slots=True)
class Roster:
    """Names of a cluster's processes beside its routers. engines: servers of others, of which each has the node with
    its number."""

    nodes: tuple[str, ...] = NODES
    engines: tuple[str, ...] = ()

    def node(self, name: str) -> str:
        """The node that is away with this process."""
        return name.replace("engine-", "decode-")


@dataclass(frozen=True, slots=True)
class Fault:
    """at_s: seconds after the faults began; seconds: how long it lasts, 0 where it has no length of its own."""

    at_s: float
    kind: str
    target: str
    seconds: float = 0.0
    number: float = 0.0

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Kind:
    """weight: how often among the others; lasts: bounds of its seconds; numbers: bounds of its number (blocks, share,
    seconds of a clock, requests: see deeds.py). Weight 0: only when asked for by name, since no network does that: UCX
    delivers a control message or breaks the connection."""

    weight: float
    targets: Sequence[str]
    lasts: tuple[float, float] = (0.0, 0.0)
    numbers: tuple[float, float] = (0.0, 0.0)


KINDS: dict[str, Kind] = {
    "kill": Kind(3, NODES),
    "kill in mid-ship": Kind(3, NODES, numbers=(1, 40)),
    "freeze": Kind(2, NODES, lasts=(0.5, 8)),
    "freeze in mid-ship": Kind(2, NODES, lasts=(0.5, 6), numbers=(1, 40)),
    "hang engine": Kind(2, NODES, lasts=(0.5, 6)),
    "hang link": Kind(2, NODES, lasts=(0.5, 6)),
    "hang loop": Kind(2, NODES, lasts=(0.5, 6)),
    "drain": Kind(1, NODES),
    "kill redis": Kind(1, ("valkey",)),
    "freeze redis": Kind(1, ("valkey",), lasts=(1, 10)),
    "flush redis": Kind(1, ("valkey",)),
    "cut from redis": Kind(2, (*NODES, *ROUTERS), lasts=(1, 12)),
    "frozen way to redis": Kind(2, (*NODES, *ROUTERS), lasts=(1, 12)),
    "sever link": Kind(2, NODES),
    "link delay": Kind(1, NODES, lasts=(2, 6), numbers=(0.005, 0.3)),
    "link loss": Kind(1, NODES, lasts=(1, 4), numbers=(0.02, 0.3)),
    "lost messages": Kind(0, NODES, lasts=(1, 4), numbers=(0.02, 0.3)),
    "link duplicates": Kind(1, NODES, lasts=(2, 6), numbers=(0.05, 0.5)),
    "link corrupts": Kind(1, NODES, lasts=(1, 4), numbers=(0.01, 0.3)),
    "slow link": Kind(1, NODES, lasts=(2, 6), numbers=(0.005, 0.05)),
    "clients leave": Kind(2, ("clients",), numbers=(20, 100)),
    "crowd": Kind(1, ("clients",), numbers=(16, 48)),
    "clock": Kind(1, NODES, numbers=(-3600, 3600)),
    "clock and kill": Kind(1, NODES, numbers=(-60, 60)),
    "kill router": Kind(1, ROUTERS),
    "freeze router": Kind(1, ROUTERS, lasts=(0.5, 5)),
    "full disk": Kind(1, ROUTERS, lasts=(2, 4)),
}  # fmt: skip
NETWORK: dict[str, Kind] = {
    "cut off": Kind(3, NODES, lasts=(0.5, 8)),
    "half open": Kind(3, NODES, lasts=(0.5, 8)),
    "cut pair": Kind(2, NODES, lasts=(0.5, 8)),
    "thin line": Kind(2, NODES, lasts=(2, 6), numbers=(1, 20)),
}
"""Only where nodes have network namespaces."""
ENGINE: dict[str, Kind] = {
    "kill engine": Kind(3, ENGINES),
    "kill part of engine": Kind(1, ENGINES),
    "freeze engine": Kind(2, ENGINES, lasts=(0.5, 8)),
}
"""Only where nodes are adapters of other servers, which have no link, no engine thread and no clock of their own."""
BESIDE_ENGINES = tuple(
    name for name in KINDS if not any(word in name for word in ("ship", "link", "lost", "hang engine"))
)
ALL = KINDS | NETWORK | ENGINE


def make_plan(
    seed: int, seconds: float, every_s: float, kinds: Sequence[str], roster: Roster = Roster()
) -> list[Fault]:
    """Faults about every_s seconds apart, of these kinds by weight; each kind comes once before the dice decide, as far
    as there is time. Of both nodes of a role only one is disturbed at a time by what takes its process away."""
    rng = random.Random(seed)
    first = rng.sample(list(kinds), len(kinds))
    plan: list[Fault] = []
    away: dict[str, float] = {}
    absent = {*NODES, *ENGINES} - {*roster.nodes, *roster.engines}
    at = every_s
    while at < seconds - every_s:
        name = first.pop() if first else rng.choices(kinds, [ALL[kind].weight for kind in kinds])[0]
        kind = ALL[name]
        spared = {other for target, until in away.items() if until > at for other in _beside(target)}
        targets = [target for target in kind.targets if target not in spared and target not in absent]
        if targets:
            target = rng.choice(targets)
            lasts, number = rng.uniform(*kind.lasts), rng.uniform(*kind.numbers)
            plan.append(Fault(round(at, 2), name, target, round(lasts, 2), round(number, 4)))
            away[target] = at + lasts + every_s
        at += every_s * rng.uniform(0.7, 1.3)
    return plan


def _beside(target: str) -> list[str]:
    role, _, number = target.rpartition("-")
    roles = ("decode", "engine") if role in ("decode", "engine") else (role,)
    return [f"{each}-{1 - int(number)}" for each in roles] if role else []
