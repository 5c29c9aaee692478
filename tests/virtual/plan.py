"""What a seed means: the cluster, its clients, and what goes wrong when. A function of the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import inf

from tests.virtual.arithmetic import VOCAB

LEAVES_S = (0.005, 2.0)
"""Clients that leave do so at once, or in the middle."""
LONGEST = 55
"""Tokens of a prompt and its output: what the smallest pool holds."""
CHANGING = 0.25
"""Share of plans in which roles change."""
MOVING = 0.2
"""Share of plans that are about streams which move."""


@dataclass(frozen=True)
class Shape:
    """How large nodes are, and how fast; verify: share of blocks whose checksum is taken; shared by all nodes.
    stream_s: what each stream beside another adds to a step. recurrent: the model has a state beside K and V; windowed:
    it has layers with windows."""

    blocks: dict[str, int]
    budget: int
    seqs: int
    window: int
    verify: float
    step_s: dict[str, float]
    stream_s: float = 0.0
    recurrent: bool = False
    windowed: bool = False


@dataclass(frozen=True)
class Asked:
    """By one client. leaves_s: after which it goes away; none: it stays. first_s, itl_s: targets of its first token,
    and of the mean time between tokens. patient: it gives way to others' targets."""

    at_s: float
    router: int
    prompt: tuple[int, ...]
    tokens: int
    deadline_s: float
    leaves_s: float | None
    first_s: float = inf
    itl_s: float = inf
    patient: bool = False


@dataclass(frozen=True)
class Fault:
    """kill, freeze and so on; for_s: until it is mended; where: any number, of the nodes that there are."""

    at_s: float
    kind: str
    where: int
    for_s: float


@dataclass(frozen=True)
class Plan:
    """duplicate, corrupt and drop: shares of control messages sent twice, of blocks whose bytes change, and of control
    messages that are lost alone, which TCP never does."""

    seed: int
    routers: int
    prefills: int
    decodes: int
    shape: Shape
    clients: tuple[Asked, ...]
    faults: tuple[Fault, ...]
    duplicate: float
    corrupt: float
    drop: float

    @property
    def calm(self) -> bool:
        return not self.faults and self.gentle

    @property
    def gentle(self) -> bool:
        """Whether no more goes wrong than that nodes drain, and change their roles."""
        return all(fault.kind in ("drain", "role") for fault in self.faults) and not (self.corrupt or self.drop)


KINDS = {
    "kill": 4, "freeze": 3, "kill_router": 1, "freeze_router": 1, "cut_link": 3, "cut_wire": 3, "registry_away": 1,
    "flush": 1, "slow_turn": 2, "drain": 4, "role": 0,
}  # fmt: skip


def make_plan(seed: int) -> Plan:
    rng = random.Random(f"plan {seed}")
    routers, prefills, decodes = rng.choice([1, 1, 2]), rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 2, 3])
    shape = Shape(
        {"prefill": rng.choice([14, 24, 48]), "decode": rng.choice([16, 24, 48])},
        rng.choice([8, 16, 64]), rng.choice([2, 4, 8]), rng.choice([1, 2, 8]), rng.choice([0.0, 0.0, 0.5, 1.0]),
        {"prefill": rng.choice([0.002, 0.02, 0.1]), "decode": rng.choice([0.002, 0.02, 0.1])},
    )  # fmt: skip
    faults = rng.choice([0, 1, 2, 4, 8])
    plan = Plan(
        seed, routers, prefills, decodes, shape, _clients(rng, routers),
        tuple(sorted((_fault(rng) for _ in range(faults)), key=lambda fault: fault.at_s)),
        rng.choice([0.0, 0.0, 0.1, 0.5]), rng.choice([0.0, 0.0, 0.0, 0.1]), rng.choice([0.0] * 9 + [0.05]),
    )  # fmt: skip
    return _changing(_moving(plan, rng) if rng.random() < MOVING else plan)


def recurrent(plan: Plan) -> Plan:
    """The same with a model that has recurrent layers, in pools with room for a few states more."""
    blocks = {role: count + 4 for role, count in plan.shape.blocks.items()}
    return replace(plan, shape=replace(plan.shape, blocks=blocks, recurrent=True))


def windowed(plan: Plan) -> Plan:
    """The same with a model that has layers with windows, in pools with room for their pages."""
    blocks = {role: count + 16 for role, count in plan.shape.blocks.items()}
    return replace(plan, shape=replace(plan.shape, blocks=blocks, windowed=True))


def _moving(plan: Plan, rng: random.Random) -> Plan:
    """Streams that last while nodes drain, and two that may take them at the least."""
    decodes = max(2, plan.decodes)
    shape = replace(plan.shape, step_s=plan.shape.step_s | {"decode": 0.1})
    clients = tuple(
        replace(asked, tokens=LONGEST - len(asked.prompt), deadline_s=max(20.0, asked.deadline_s))
        for asked in plan.clients
    )
    drains = tuple(
        Fault(asked.at_s + 3 * rng.random(), "drain", plan.prefills + rng.randrange(decodes), rng.choice([0.05, 2.0]))
        for asked in rng.choices(clients, k=rng.choice([1, 2, 4]))
    )
    faults = tuple(sorted((*plan.faults, *drains), key=lambda fault: fault.at_s))
    return replace(plan, decodes=decodes, shape=shape, clients=clients, faults=faults)


def _changing(plan: Plan) -> Plan:
    """Nodes are asked to change their roles, beside whatever else is planned."""
    rng = random.Random(f"roles {plan.seed}")
    if rng.random() >= CHANGING:
        return plan
    changes = [Fault(rng.random() * rng.choice([0.3, 3.0, 8.0]), "role", rng.randrange(1000), 0.05) for _ in range(4)]
    return replace(plan, faults=tuple(sorted((*plan.faults, *changes), key=lambda fault: fault.at_s)))


def _clients(rng: random.Random, routers: int) -> tuple[Asked, ...]:
    """Prompts share beginnings."""
    stems = [tuple(rng.randrange(VOCAB) for _ in range(40)) for _ in range(2)]
    span_s = rng.choice([0.2, 2.0, 6.0])
    asked = []
    for _ in range(rng.choice([2, 4, 8, 14])):
        stem, length = rng.choice(stems), rng.choice([1, 4, 7, 12, 20, 40])
        own = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5])))
        tokens = rng.choice([1, 2, 4, 9, 14, 14, 50])
        leaves_s = rng.choice(LEAVES_S) * rng.random() if rng.random() < 0.2 else None
        deadline_s = rng.choice([1.0, 8.0, 20.0, 30.0])
        prompt = stem[:length] + own
        tokens = min(tokens, LONGEST - len(prompt))
        asked.append(Asked(rng.random() * span_s, rng.randrange(routers), prompt, tokens, deadline_s, leaves_s))
    return tuple(sorted(asked, key=lambda each: each.at_s))


def _fault(rng: random.Random) -> Fault:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return Fault(
        rng.random() * rng.choice([0.3, 2.0, 8.0]), kind, rng.randrange(1000), rng.choice([0.05, 0.5, 2.0, 6.0])
    )
