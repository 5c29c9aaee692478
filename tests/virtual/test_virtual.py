"""The whole protocol on a virtual clock: routers, ladder, registry, scheduler and dock under seeded schedules of lates,
losses, duplicates, cancels, deaths and restarts. And mistakes put into it, each of which must be found.

Seeds are repeated exactly: `make simulate-protocol SEEDS=1 FIRST=4711`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.short_form import is_short
from tests.virtual.clock import Stuck, VirtualLoop
from tests.virtual.finding import FOUND_BY, MUTANTS, RARE, finders
from tests.virtual.nodes import METRICS
from tests.virtual.plan import KINDS, Plan, make_plan, recurrent, windowed
from tests.virtual.world import LEAST_DONE, World, share_done

SEEDS = int(os.environ.get("KVFERRY_TEST_SCHEDULES", "60" if is_short() else "100"))
FROM = int(os.environ.get("KVFERRY_TEST_SCHEDULES_FROM", "0"))
AT_ONCE = 20
MUTANT_SEEDS = 100


def lived(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> World:
    world = World(change(make_plan(seed)))
    world.run()
    return world


@pytest.mark.parametrize("begin", range(FROM, FROM + SEEDS, AT_ONCE))
def test_whatever_the_schedule_every_client_gets_its_tokens_and_nothing_is_left(begin):
    wrong, outcomes = {}, Counter()
    for seed in range(begin, min(begin + AT_ONCE, FROM + SEEDS)):
        world = lived(seed)
        outcomes += world.outcomes()
        if world.wrong:
            wrong[seed] = world.wrong
    assert not wrong
    assert share_done(outcomes) >= LEAST_DONE, outcomes


@pytest.mark.parametrize("begin", range(FROM, FROM + SEEDS, AT_ONCE))
def test_a_model_with_recurrent_layers_keeps_the_same_promises(begin):
    """States travel with prompts, streams and copies, and come back from checkpoints."""
    wrong, outcomes = {}, Counter()
    for seed in range(begin, min(begin + AT_ONCE, FROM + SEEDS)):
        world = lived(seed, recurrent)
        outcomes += world.outcomes()
        if world.wrong:
            wrong[seed] = world.wrong
    assert not wrong
    assert share_done(outcomes) >= LEAST_DONE, outcomes


@pytest.mark.parametrize("begin", range(FROM, FROM + SEEDS, AT_ONCE))
def test_a_model_with_windows_keeps_the_same_promises(begin):
    """Pages travel with prompts, streams and copies, and are given up behind a window."""
    wrong, outcomes = {}, Counter()
    for seed in range(begin, min(begin + AT_ONCE, FROM + SEEDS)):
        world = lived(seed, windowed)
        outcomes += world.outcomes()
        if world.wrong:
            wrong[seed] = world.wrong
    assert not wrong
    assert share_done(outcomes) >= LEAST_DONE, outcomes


def test_nobody_is_told_of_nodes_that_only_drain():
    """Few seeds are gentle: more of them than above."""
    seeds = [seed for seed in range(FROM + SEEDS, FROM + SEEDS + 300) if make_plan(seed).gentle]
    assert seeds
    assert not {seed: wrong for seed in seeds if (wrong := lived(seed).wrong)}


def test_a_seed_is_repeated_exactly():
    for seed in (3, 8, 26):
        one, other = lived(seed), lived(seed)
        assert one.trace == other.trace
        assert one.outcomes() == other.outcomes()


def test_schedules_have_every_kind_of_trouble():
    plans = [make_plan(seed) for seed in range(200)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)
    assert any(plan.drop for plan in plans)
    assert any(plan.duplicate for plan in plans)
    assert any(plan.corrupt for plan in plans)
    assert any(asked.leaves_s for plan in plans for asked in plan.clients)


def test_streams_move_while_nodes_drain():
    moves = METRICS["decode"].moves["moved"]._value
    before = moves.get()
    plans = ((seed, make_plan(seed)) for seed in range(200))
    drained = [seed for seed, plan in plans if sum(fault.kind == "drain" for fault in plan.faults) > 1]
    assert not any(lived(seed).wrong for seed in drained[:6])
    assert moves.get() > before


def test_prefixes_are_fetched_from_where_they_are():
    def done() -> float:
        return sum(metrics.fetches.ended["done"]._value.get() for metrics in METRICS.values())

    before = done()
    for seed in range(0, 60, 2):
        assert not lived(seed).wrong
        if done() > before:
            return
    pytest.fail("no prefix was fetched in any schedule")


@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - RARE))
def test_a_mistake_in_the_protocol_is_found(name):
    """By what is blamed in one of these seeds, in which nothing is without it; the first of them found it when it was
    written."""
    seeds = [FOUND_BY.get(name, 0), *range(MUTANT_SEEDS)]
    assert next(finders(name, seeds), None) is not None


def test_who_waits_without_end_is_found():
    loop = VirtualLoop()
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
    loop.close()
