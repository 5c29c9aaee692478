"""Requests that wait for room on a crowded decode node, with the whole protocol on the virtual clock.

The world checks each token, that no block is written for two, and that all books balance in the end: whoever asks
another node while a grant may still come gets one of both, and leaves nothing behind."""

from __future__ import annotations

import random

import pytest

from tests.virtual.arithmetic import VOCAB
from tests.virtual.plan import Asked, Fault, Plan, Shape
from tests.virtual.routers import METRICS
from tests.virtual.world import World

SHAPE = Shape({"prefill": 48, "decode": 24}, 64, 8, 8, 0.0, {"prefill": 0.005, "decode": 0.05})
SHORT, LONG = 4, 60
"""Output tokens; the long streams fill a node for seconds."""


def left() -> float:
    """Return how often requests left a crowded node so far."""
    return METRICS.retries.labels("room_elsewhere")._value.get()


def crowd(seed: int) -> list[Asked]:
    """Twice as many streams as both decode nodes hold, most of them at once, from two routers."""
    rng = random.Random(f"room {seed}")
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(12)) for _ in range(24)]
    return sorted(
        (
            Asked(rng.choice([0.0, 0.1, 1.0]), rng.randrange(2), prompt, rng.choice([SHORT, LONG]), 60.0, None)
            for prompt in prompts
        ),
        key=lambda each: each.at_s,
    )


def lived(seed: int, faults: tuple[Fault, ...] = ()) -> World:
    world = World(Plan(seed, 2, 1, 3, SHAPE, tuple(crowd(seed)), faults, 0.0, 0.0, 0.0))
    assert world.run() == []
    return world


def test_a_crowd_gets_all_its_tokens_and_some_of_it_leaves_crowded_nodes() -> None:
    before = left()
    for seed in range(12):
        world = lived(seed)
        assert {client.outcome for client in world.clients} <= {"done", "overloaded"}
        assert sum(client.outcome == "done" for client in world.clients) > len(world.clients) / 2
    assert left() > before


@pytest.mark.parametrize("kind", ["kill", "freeze", "cut_link", "drain"])
def test_whatever_befalls_nodes_meanwhile(kind: str) -> None:
    for seed in range(6):
        lived(seed, tuple(Fault(at_s, kind, where, 1.0) for at_s, where in ((2.0, seed), (3.5, seed + 1))))
