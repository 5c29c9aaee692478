"""Pools that scale on their signals: a burst adds a pod in time, an hour of noise changes no direction, and zero is
reached and left. Metrics of simulated pools go into a real Prometheus, which is asked what the manifests ask."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, sin, tau

import pytest

from tests.deploy.autoscalers import SYNC_S, Scaled
from tests.deploy.pools import ALONE_S, STREAM_S, TICK_S, Pools
from tests.deploy.trials import SCRAPE_S, Clock, Trial, clock, hpa, keda
from tests.short_form import is_short

BURST = 14, 650
"""Prompts and their tokens."""
QUIET_S = 40.0
MOST_S = 15.0


@pytest.fixture(scope="module")
def time_() -> Iterator[Clock]:
    with clock() as found:
        yield found


def pools(time_: Clock, name: str, rate: float, prefill: int = 1, decode: int = 1, seats: int = 16) -> Pools:
    """Of a namespace that nothing was written into before."""
    return Pools(f"{name}-{time_.now:.0f}", time_.now, rate=rate, seats=seats, prefill=prefill, decode=decode)


def burst(at: float = QUIET_S, output: float = 64) -> Callable[[Pools, float], None]:
    def load(here: Pools, passed: float) -> None:
        if passed == at:
            for _ in range(BURST[0]):
                here.arrive(BURST[1], output)

    return load


def noise(seed: int, nodes: float, rate: float) -> Callable[[Pools, float], None]:
    """Requests that would keep so many prefill nodes busy: at random times, of random lengths, a fifth more and less
    over ten minutes, and a tenth from one minute to the next."""
    draw, mean, ahead = random.Random(seed), 650.0, [0.0, 1.0]

    def load(here: Pools, passed: float) -> None:
        if passed % 60 == 0:
            ahead[1] = draw.uniform(0.9, 1.1)
        per_s = nodes * rate / mean * ahead[1] * (1 + 0.2 * sin(tau * passed / 600))
        while ahead[0] <= passed:
            if passed:
                here.arrive(draw.uniform(0.1, 1.9) * mean, draw.uniform(20, 380))
            ahead[0] += draw.expovariate(per_s)

    return load


def patient(scalers: dict[str, Scaled]) -> dict[str, Scaled]:
    """They poll as often as the controller looks: what is never at zero loses nothing by it, and the test is short."""
    return {pool: replace(scaled, poll_s=SYNC_S) for pool, scaled in scalers.items()}


@pytest.mark.parametrize("rate", [180.0, 600.0])
def test_a_burst_adds_a_prefill_pod_within_15_seconds_of_being_seen(time_: Clock, rate: float) -> None:
    """180 tokens a second was the cluster on which an autoscaler slept through the 51 seconds that the burst took."""
    trials = [
        Trial(pools(time_, f"burst-{rate:.0f}-{a}-{b}", rate, decode=2), hpa(), burst(), scrape_at=a, sync_at=b)
        for a in (0, 1.5, 3, 4.5)
        for b in range(0, 15, 2)
    ]
    time_.run(trials, QUIET_S + 25)
    took = []
    for trial in trials:
        (_, before), (at, after), *_ = trial.scaling["prefill"].changes
        assert (before, after) == (1, 3 if rate < 200 else 2)
        seen = (trial.scrape_at - QUIET_S) % SCRAPE_S
        assert at - QUIET_S - seen <= MOST_S
        took.append(at - QUIET_S)
        assert not trial.scaling["decode"].changes
    assert max(took) <= SYNC_S + SCRAPE_S
    assert sum(seconds <= MOST_S for seconds in took) >= 0.8 * len(took)
    assert sum(took) / len(took) <= 10.5


@pytest.mark.parametrize("rate", [600.0, 2000.0])
def test_an_hour_of_noise_changes_no_direction(time_: Clock, rate: float) -> None:
    """At loads between and on the steps from one pod to the next, by both autoscalers, once all goes its way."""
    levels, since = (0.4, 1.05, 2.4) if is_short() else (0.4, 0.7, 1.05, 1.4, 2.4), 300
    trials = [
        Trial(
            pools(
                time_,
                f"noise-{rate:.0f}-{level}-{n}",
                rate,
                prefill=ceil(level / 0.7),
                decode=max(1 + n, ceil(level * rate / 650 * 5.4 / 16 / 0.75)),  # requests a second of 5.4 s each
            ),
            scalers,
            noise(n, level, rate),
            sync_at=7,
            since=since,
        )
        for level in levels
        for n, scalers in enumerate((patient(keda()), hpa()))
    ]
    time_.run(trials, 3600 + since)
    for trial in trials:
        for role, scaling in trial.scaling.items():
            assert scaling.turns == 0, (trial.pools.namespace, role, scaling.changes)
            assert scaling.replicas
        assert trial.pools.done > 1000
    for trial, level in zip(trials, [level for level in levels for _ in range(2)], strict=True):
        assert trial.scaling["prefill"].replicas <= ceil(1.32 * level / 0.7) + 1


def test_pools_go_to_zero_and_come_back_for_requests_that_the_router_holds(time_: Clock) -> None:
    cooldown = keda()["decode"].cooldown_s

    def load(here: Pools, passed: float) -> None:
        burst(0.0)(here, passed)
        burst(cooldown + 400)(here, passed)

    trial = Trial(pools(time_, "zero", 180.0), keda(), load)
    time_.run([trial], cooldown + 600)
    for role in ("prefill", "decode"):
        changes = trial.scaling[role].changes
        (to_zero,) = [at for at, count in changes if count == 0]
        assert to_zero >= cooldown
        assert to_zero <= cooldown + 390
        back = next(at for at, _ in changes if at > to_zero)
        assert back - (cooldown + 400) <= SCRAPE_S + keda()[role].poll_s
    assert trial.pools.done == 2 * BURST[0]


def test_prompts_that_decode_nodes_compute_bring_the_first_prefill_node(time_: Clock) -> None:
    trial = Trial(pools(time_, "none", 180.0, prefill=0), keda(), burst())
    time_.run([trial], QUIET_S + 30)
    assert trial.scaling["prefill"].changes[1][0] - QUIET_S <= SCRAPE_S + keda()["prefill"].poll_s
    assert trial.scaling["decode"].replicas >= 1


def test_streams_that_fill_their_nodes_bring_others_and_slow_steps_do_too(time_: Clock) -> None:
    def streams(count: int) -> Callable[[Pools, float], None]:
        def load(here: Pools, passed: float) -> None:
            if passed == QUIET_S:
                for _ in range(count):
                    here.arrive(10, 8000)

        return load

    since = QUIET_S + SCRAPE_S
    trial = Trial(pools(time_, "streams", 2000.0), keda(), streams(40), since=since)
    slow = Trial(pools(time_, "slow", 2000.0, seats=1000), keda(), streams(80), since=since)
    time_.run([trial, slow], QUIET_S + 120)
    assert trial.scaling["decode"].replicas == 4  # 40 of 16 seats, at three quarters
    assert slow.scaling["decode"].replicas == 2  # 39.5 ms more than one stream alone has, of 30 that the target allows
    assert trial.scaling["decode"].turns == slow.scaling["decode"].turns == 0


@pytest.mark.parametrize("need", [3.0, 6.0])
def test_a_pool_that_is_far_too_small_grows_to_what_it_needs_and_not_beyond(time_: Clock, need: float) -> None:
    """Requests come evenly, as many as fill so many nodes; what queued until the pods were there is not taken for what
    comes. Some more nodes than it needs in the end drain that queue."""
    seats, output = 16, 300.0
    lasts = output * (ALONE_S + STREAM_S * (seats - 1))
    due: defaultdict[Pools, float] = defaultdict(float)

    def load(here: Pools, passed: float) -> None:
        if passed >= QUIET_S:
            due[here] += need * seats / lasts * TICK_S
            while due[here] >= 1:
                here.arrive(50, output)
                due[here] -= 1

    trials = [
        Trial(pools(time_, f"grows-{need}-{n}-{at}", 20_000.0, seats=seats), scalers, load, sync_at=at)
        for n, scalers in enumerate((keda(), hpa()))
        for at in (0, 5, 10)
    ]
    time_.run(trials, QUIET_S + 600)
    most = ceil(need / 0.75)
    for trial in trials:
        changes = trial.scaling["decode"].changes
        assert max(count for _, count in changes) <= 1.75 * most, changes
        assert min(at for at, count in changes if count >= most) <= QUIET_S + 120
        assert not trial.pools.waiting


def test_without_routers_or_prometheus_nothing_is_known_and_nothing_goes_to_zero(time_: Clock) -> None:
    queries = [s.query.replace('kvferry"', 'nowhere"') for scaled in keda().values() for s in scaled.signals]
    assert time_.values(queries) == [None] * len(queries)
    trial = Trial(pools(time_, "unscraped", 600.0), keda(), lambda here, passed: None, scrape_at=-0.1)
    time_.run([trial], 700)
    assert {scaling.replicas for scaling in trial.scaling.values()} == {1}
