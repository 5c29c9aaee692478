"""Circuit breakers over nodes and pairs, on a clock of the test's own."""

from __future__ import annotations

import pytest

from kvferry.router.nodes.circuit_breakers import MEMORY_S, PAUSE_S, CircuitBreakers

P1, P2, D1, D2 = ("p1", 1), ("p2", 1), ("d1", 1), ("d2", 1)
FIRST, LONGEST = PAUSE_S


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_node_that_failed_is_shut_for_a_moment_and_forgotten_once_it_works(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    assert not breakers.any
    breakers.node_failed(P1)
    assert breakers.any
    assert breakers.open() == ({P1}, set())
    clock.now += FIRST
    assert not breakers.open().nodes
    breakers.use(P1, D1)
    breakers.node_works(P1)
    assert not breakers.any


def test_one_at_a_time_tries_and_each_failure_doubles_the_pause(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    breakers.node_failed(P1)
    pause = FIRST
    for _ in range(8):
        clock.now += pause
        assert not breakers.open().nodes
        breakers.use(P1, D1)
        assert breakers.open().nodes == {P1}, "the others wait for the one that tries"
        breakers.node_failed(P1)
        pause = min(2 * pause, LONGEST)
        clock.now += pause - 0.01
        assert breakers.open().nodes == {P1}
        clock.now += 0.01
        assert not breakers.open().nodes


def test_attempts_that_were_under_way_as_it_failed_are_one_failure(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    for _ in range(10):
        breakers.node_failed(P1)
        clock.now += 0.01
    clock.now += FIRST
    assert not breakers.open().nodes


def test_a_try_without_an_outcome_is_followed_by_another(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    breakers.node_failed(P1)
    clock.now += FIRST
    breakers.use(P1, None)
    clock.now += 2 * FIRST
    assert not breakers.open().nodes


def test_what_may_be_chance_shuts_only_when_it_happens_again(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    breakers.pair_failed(P1, D1, certain=False)
    assert not breakers.open().pairs
    breakers.pair_failed(P1, D1, certain=False)
    assert breakers.open().pairs == {(P1, D1)}
    breakers.pair_failed(P2, D2, certain=False)
    clock.now += MEMORY_S + 1
    breakers.pair_failed(P2, D2, certain=False)
    assert not breakers.open().pairs


def test_who_fails_with_two_is_at_fault_with_all(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    breakers.pair_failed(P1, D1)
    assert breakers.open() == (set(), {(P1, D1)})
    breakers.pair_failed(P2, D1)
    assert (None, D1) in breakers.open().pairs
    assert not any(pair[0] in (P1, P2) and pair[1] is None for pair in breakers.open().pairs)
    breakers.pair_works(P2, D1)
    assert breakers.open().pairs == {(P1, D1)}


def test_a_prefill_node_that_reaches_no_decode_node(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    breakers.pair_failed(P1, D1)
    breakers.pair_failed(P1, D2)
    assert (P1, None) in breakers.open().pairs
    assert (None, D1) not in breakers.open().pairs


def test_what_failed_long_ago_is_as_good_as_any(clock: Clock) -> None:
    breakers = CircuitBreakers(clock)
    breakers.node_failed(P1)
    breakers.pair_failed(P1, D1)
    clock.now += MEMORY_S + 1
    assert not any(breakers.open())
    assert not breakers.any
