"""Learned rates of return, against distributions that are known."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest

from kvferry.engine.return_rates import BINS, ENDS, MEMORY, ReturnClasses, ReturnRates, turn_level


def learn(rates: ReturnRates, pauses: list[float | None], until: float = 600.0) -> None:
    """Show pauses in seconds; None: it never returned in the time that it was watched."""
    for pause in pauses:
        end = until if pause is None else pause
        start = 0.0
        for place, stop in enumerate((*ENDS, 1e9)):
            rates.exposed(place, min(end, stop) - start, 1.0)
            start = stop
            if end <= stop:
                break
        if pause is None:
            rates.lost(1.0)
        else:
            rates.returned(bisect_right(ENDS, pause), 1.0)


def value(rates: ReturnRates, age_s: float) -> float:
    return rates.values()[bisect_right(ENDS, age_s)]


def test_a_constant_rate_is_learned_and_its_value_is_the_rate() -> None:
    rng, rates = random.Random(1), ReturnRates()
    learn(rates, [rng.expovariate(0.1) for _ in range(5000)])
    for age_s in (1, 5, 20):
        assert value(rates, age_s) == pytest.approx(0.1, rel=0.3)


def test_pauses_of_ten_seconds_are_worth_more_shortly_before_and_little_afterwards() -> None:
    rng, rates = random.Random(1), ReturnRates()
    learn(rates, [rng.uniform(9, 11) for _ in range(400)])
    assert value(rates, 1) == pytest.approx(1 / 9, rel=0.4)
    assert value(rates, 7) > 2 * value(rates, 1)
    assert value(rates, 60) < value(rates, 1) / 3


def test_those_that_never_return_count_from_the_beginning() -> None:
    half, none = ReturnRates(), ReturnRates()
    learn(half, [10.0, None] * 200)
    learn(none, [None] * 400)
    assert value(none, 5) < value(half, 5) / 20


def test_a_class_that_saw_little_follows_the_wider_one_and_then_itself() -> None:
    classes = ReturnClasses(max_classes=3)
    learn(classes.find("a", "paused", 1), [10.0] * 300)
    new = classes.find("b", "paused", 1)
    assert value(new, 5) == pytest.approx(value(classes.find("a", "paused", 1), 5), rel=0.3)
    learn(new, [None] * 300)
    assert value(new, 5) < value(classes.find("a", "paused", 1), 5) / 10
    assert classes.find("b", "paused", 1) is new
    for name in "cde":
        classes.find(name, "paused", 1)
    assert classes.find("b", "paused", 1) is not new


def test_what_never_returned_is_worth_less_at_any_age_than_what_returns_late() -> None:
    """Prompts that come once were worth more than answers whose clients go on after minutes."""
    rng, classes = random.Random(1), ReturnClasses(max_classes=9)
    once, answers = classes.find("", "answered", 0), classes.find("", "answered", 3)
    learn(once, [None] * 60, until=90.0)
    learn(answers, [rng.expovariate(1 / 90) if rng.random() < 0.4 else None for _ in range(30)])
    late = max(value(once, age_s) for age_s in (10, 60, 100, 200, 400))
    assert 3 * late < min(value(answers, age_s) for age_s in (0, 10, 30, 60))


def test_a_group_follows_its_class_and_then_itself() -> None:
    classes = ReturnClasses(max_classes=9)
    learn(classes.find("a", "tool", 0, 1), [2.0] * 100)
    new = classes.find("a", "tool", 0, 2)
    assert value(new, 1) == pytest.approx(value(classes.find("a", "tool", 0), 1), rel=0.3)
    learn(new, [50.0] * 100)
    assert value(new, 1) < value(classes.find("a", "tool", 0, 1), 1) / 5


def test_habits_change() -> None:
    rates = ReturnRates()
    learn(rates, [None] * int(4 * MEMORY))
    learn(rates, [3.0] * int(4 * MEMORY))
    assert value(rates, 1) == pytest.approx(1 / 2, rel=0.5)
    assert len(rates.values()) == BINS


def test_levels_of_turns_are_their_numbers_and_then_logarithms() -> None:
    assert [turn_level(prompts) for prompts in (0, 1, 2, 15, 16, 31, 32, 255, 256, 10**6)] == [
        0, 1, 2, 15, 16, 16, 17, 19, 20, 20,
    ]  # fmt: skip


def test_classes_that_are_alike_take_longer_to_differ_in_when_chains_return() -> None:
    classes = ReturnClasses(max_classes=9)
    learn(classes.find("a", "paused", 1), [10.0] * 300)
    for level, alike in ((2, True), (3, False)):
        learn(classes.find("a", "paused", level, alike=alike), [2.0] * 3)
    same, apart = (classes.find("a", "paused", level) for level in (2, 3))
    assert value(same, 0) < value(apart, 0), "three returns are a small sample"
