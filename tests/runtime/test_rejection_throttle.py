"""What a refusal waits for, and who never waits."""

from __future__ import annotations

import pytest

from kvferry.runtime.rejection_throttle import (
    BUSY_S,
    CREDIT_S,
    MAX_COST_S,
    MAX_DELAY_S,
    MIN_COST_S,
    SHARE,
    SOURCES,
    RejectionThrottle,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> RejectionThrottle:
    made = RejectionThrottle(clock)
    made.served()
    return made


def test_a_few_refusals_cost_nothing(throttle: RejectionThrottle) -> None:
    assert [throttle.delay_s("a", 0.001) for _ in range(int(CREDIT_S / 0.001))] == [0.0] * int(CREDIT_S / 0.001)


def test_a_client_that_waits_for_its_answers_gets_its_share_of_the_loop_and_no_more(
    throttle: RejectionThrottle, clock: Clock
) -> None:
    took, began = 0.002, clock.now
    for _ in range(3000):
        clock.now += took
        throttle.served()
        clock.now += throttle.delay_s("a", took)
    assert 3000 * took - CREDIT_S == pytest.approx(SHARE * (clock.now - began), rel=0.05)


@pytest.mark.parametrize(("took", "counted"), [(0.0, MIN_COST_S), (30.0, MAX_COST_S)])
def test_what_a_request_counts_as_is_bounded(throttle: RejectionThrottle, took: float, counted: float) -> None:
    for _ in range(int(CREDIT_S / counted) + 1):
        throttle.delay_s("a", took)
    assert throttle.delay_s("a", took) == pytest.approx(counted / SHARE, rel=1.01)


def test_nobody_waits_longer_than_it_is_patient_and_what_is_owed_ends_with_that(
    throttle: RejectionThrottle, clock: Clock
) -> None:
    delays = [throttle.delay_s("a", 0.01) for _ in range(10_000)]
    assert max(delays) == pytest.approx(MAX_DELAY_S)
    clock.now += MAX_DELAY_S
    throttle.served()
    assert throttle.delay_s("a", 0.01) == 0.0


def test_others_pay_for_their_own_only(throttle: RejectionThrottle) -> None:
    while throttle.delay_s("a", 0.01) < 1:
        pass
    assert throttle.delay_s("b", 0.01) == 0.0


def test_nobody_waits_while_nobody_is_served(clock: Clock) -> None:
    throttle = RejectionThrottle(clock)
    assert {throttle.delay_s("a", 0.01) for _ in range(100)} == {0.0}
    throttle.served()
    assert throttle.delay_s("a", 0.01) > 0
    clock.now += BUSY_S
    for _ in range(100):
        throttle.delay_s("b", 0.01)
    assert throttle.delay_s("b", 0.01) == 0.0


def test_sources_without_end_are_not_kept(throttle: RejectionThrottle) -> None:
    for number in range(2 * SOURCES):
        throttle.delay_s(str(number), 0.01)
    assert len(throttle._free_at) == SOURCES
