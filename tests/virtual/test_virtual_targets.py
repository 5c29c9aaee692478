"""Targets with the whole protocol on the virtual clock: routers, engines and docks as they are, each token checked."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvferry.placement.types import STREAM_SHARE
from tests.virtual.arithmetic import VOCAB
from tests.virtual.plan import Asked, Plan, Shape
from tests.virtual.routers import METRICS
from tests.virtual.world import World

STEP_S = 0.02
SHAPE = Shape(
    {"prefill": 48, "decode": 120}, 64, 8, 8, 0.0, {"prefill": 0.005, "decode": STEP_S}, STREAM_SHARE * STEP_S
)
ITL_S = STEP_S * (1 + 2.95 * STREAM_SHARE)
"""Three streams of a node keep to it, a fourth would not; the way from prefill to decode takes some of it, too."""
TOKENS, DECODES = 20, 2
CAPACITY = 3 * DECODES / (TOKENS * STEP_S * (1 + 2 * STREAM_SHARE))
"""Requests a second, where every node always has three streams."""


def asked(rng: random.Random, at_s: float, tokens: int = TOKENS, **how: Any) -> Asked:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(12))
    return replace(Asked(at_s, 0, prompt, tokens, 60.0, None), **how)


def lived(seed: int, clients: list[Asked], decodes: int = DECODES, *, fair: bool = False) -> World:
    """fair: nothing is late."""
    clients.sort(key=lambda each: each.at_s)
    world = World(Plan(seed, 1, 1, decodes, SHAPE, tuple(clients), (), 0.0, 0.0, 0.0))
    if fair:
        world.weather.usual_s, world.weather.late, world.weather.very_late, world.weather.busy_s = 1e-4, 0.0, 0.0, 0.0
    assert world.run() == []
    return world


def displaced() -> float:
    return METRICS.retries.labels("displaced")._value.get()


@pytest.mark.parametrize("seed", range(6))
def test_patient_streams_give_way_and_lose_no_token(seed: int) -> None:
    """Whenever that happens: while a prompt is computed or shipped, or a stream runs, or goes on once more."""
    rng, before = random.Random(f"displaced {seed}"), displaced()
    patient = [asked(rng, rng.random(), rng.choice([1, 8, 40]), patient=True) for _ in range(10)]
    urgent = [asked(rng, 4 * rng.random(), rng.choice([2, 20]), itl_s=ITL_S) for _ in range(8)]
    world = lived(seed, patient + urgent, decodes=1)
    assert displaced() > before
    assert {client.outcome for client in world.clients if client.asked.patient} == {"done"}
    assert all(client.outcome in ("done", "overloaded") for client in world.clients)
    assert sum(client.outcome == "done" for client in world.clients) > len(patient)


def good(load: float, span_s: float = 12.0) -> tuple[float, float]:
    """Requests a second that met their targets at so many times the capacity, and their share of those admitted."""
    rng, clients, at_s = random.Random("load"), list[Asked](), 0.0
    while (at_s := at_s + rng.expovariate(load * CAPACITY)) < span_s:
        clients.append(asked(rng, at_s, first_s=0.5, itl_s=ITL_S))
    world = lived(1, clients, fair=True)
    met, admitted = (
        sum(client.met for client in world.clients),
        sum(client.outcome == "done" for client in world.clients),
    )
    return met / span_s, met / admitted


def test_overload_costs_no_goodput() -> None:
    usual, kept = good(1.0)
    crowded, kept_crowded = good(1.3)
    assert crowded >= 0.9 * usual
    assert min(kept, kept_crowded) >= 0.95, (kept, kept_crowded)
