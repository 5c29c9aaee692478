"""What a node says of itself to those who scale pools: right where it is known, zero when idle, never jumping."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.engine.engine import Engine
from kvferry.engine.events import Stepped
from kvferry.protocol.lease import Load, Rates
from kvferry.protocol.messages import Job
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.rates import RateMeter
from kvferry.worker.scaling_signals import (
    SLOWER,
    WAIT_S,
    decode_pressure,
    latency_share,
    prefill_backlog_s,
    set_scaling_gauges,
)
from tests.toy import make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, worker

PROMPT = 40


@contextlib.asynccontextmanager
async def decode_node(seqs: int = 8) -> AsyncIterator[tuple[Worker, Router]]:
    """With a router that listens to it."""
    async with worker("decode", make_engine(256, seqs=seqs), max_num_seqs=seqs) as here:
        router = Router(here, here, "router")
        await router.connect()
        try:
            yield here, router
        finally:
            await router.close()


async def ask(here: Worker, router: Router, jobs: list[Job]) -> None:
    """All at once."""
    with here.frozen_engine():
        for job in jobs:
            assert (await router.generate(job)).status_code == 202


async def scraped(here: Worker) -> dict[str, float]:
    """The node's gauges as Prometheus reads them."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{here.node.address.url}/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name.removeprefix("kvferry_"): s.value for s in samples if set(s.labels) <= {"role", "model_name"}}


def prompts(count: int, max_tokens: int = 4) -> list[Job]:
    return [make_job(f"r{i}", [i, *range(1, PROMPT)], max_tokens) for i in range(count)]


async def test_prompts_that_queue_on_a_decode_node_are_seconds_at_its_own_rate_until_they_are_computed() -> None:
    async with decode_node() as (here, router):
        idle = await scraped(here)
        assert (idle["prefill_backlog_seconds"], idle["decode_pressure"], idle["admission_wait_seconds"]) == (0, 0, 0)
        assert idle["inter_token_target_ratio"] == 0
        here.pause_at(0)
        await ask(here, router, prompts(3))
        await until(lambda: here.paused)
        now = await scraped(here)
        assert now["prefill_rate_tokens_per_second"] == here.loaded.lease().rates.prefill_tokens_per_s > 0
        assert now["prefill_backlog_seconds"] == pytest.approx(3 * PROMPT / now["prefill_rate_tokens_per_second"])
        assert now["decode_pressure"] == pytest.approx(3 / 8)
        here.resume()
        await here.settle()
        after = await scraped(here)
        assert after["prefill_backlog_seconds"] == after["decode_pressure"] == after["inter_token_target_ratio"] == 0
        assert after["prefill_rate_tokens_per_second"] > 0


async def test_who_waits_for_a_seat_presses_more_the_longer_it_waits() -> None:
    async with decode_node(seqs=2) as (here, router):
        here.pause_at(12)
        await ask(here, router, prompts(3, 60))
        await until(lambda: here.paused)
        assert here.loaded.engine.load.running_requests == 2
        first = await scraped(here)
        await until(lambda: here.loaded.engine.waits_s > first["admission_wait_seconds"] + 0.2)
        later = await scraped(here)
        assert later["admission_wait_seconds"] >= first["admission_wait_seconds"] + 0.2
        assert first["decode_pressure"] == pytest.approx(2 / 2 + 1 / 2 * first["admission_wait_seconds"] / WAIT_S)
        assert later["decode_pressure"] == pytest.approx(2 / 2 + 1 / 2 * later["admission_wait_seconds"] / WAIT_S)
        here.resume()
        await here.settle()
        assert (await scraped(here))["admission_wait_seconds"] == 0


def refused(engine: Engine) -> str | None:
    found = engine.scheduler.refused
    return None if found is None else found.job.request_id


def test_a_prompt_that_waits_for_its_turn_to_be_computed_waits_for_no_seat() -> None:
    engine = make_engine(256, budget=8, beside=8)
    for job in prompts(3):
        engine.add(job)
    engine.step()
    assert engine.load().waiting_requests == 2
    assert refused(engine) is None


def test_a_prompt_that_finds_no_blocks_does_and_one_that_is_preempted_waits_anew() -> None:
    engine = make_engine(12, budget=64, beside=64)
    engine.add(make_job("old", list(range(20)), 24))
    engine.step()
    engine.add(make_job("late", list(range(30, 60)), 4))
    engine.step()
    assert refused(engine) == "late"
    engine.cancel("late", 0)
    engine.add(make_job("young", list(range(60, 78)), 24))
    for _ in range(12):
        engine.step()
    request = engine.scheduler.refused
    assert engine.scheduler.preempted_total
    assert request is not None
    assert request.job.request_id == "young"
    assert request.queued > request.arrived


def gauges(role: str, load: Load, meter: RateMeter, waits_s: float = 0.0) -> Any:
    metrics = WorkerMetrics(role)
    set_scaling_gauges(metrics.scaling, role, WorkerSettings(role=role, itl_target_ms=50), load, meter, waits_s)
    return lambda name: metrics.registry.get_sample_value(f"kvferry_{name}", {"role": role})


def test_latency_counts_from_what_a_stream_takes_alone_up_to_the_target() -> None:
    meter = RateMeter(Rates(step_s=0.02))
    load = Load(running_requests=4, active_blocks=10, total_blocks=100)
    assert gauges("decode", load, meter)("decode_pressure") == pytest.approx(0.1)
    for _ in range(1000):
        meter.stepped(Stepped(0.065, 0, 4, 0, 0))
    value = gauges("decode", load, meter)
    assert value("decode_pressure") == pytest.approx(1.5, rel=0.01)
    assert value("inter_token_target_ratio") == pytest.approx(1.3, rel=0.01)
    assert gauges("decode", Load(total_blocks=100), meter)("inter_token_target_ratio") == 0
    assert gauges("decode", Load(total_blocks=100), meter)("decode_pressure") == 0


def test_one_slow_step_moves_latency_little_and_prompts_alone_not_at_all() -> None:
    meter = RateMeter(Rates(step_s=0.02))
    meter.stepped(Stepped(0.2, 256, 1, 0, 0))
    assert 0.02 < meter.itl_s < 0.025
    seen = meter.itl_s
    meter.stepped(Stepped(3.0, 256, 0, 0, 0))
    assert meter.itl_s == seen


def test_a_target_that_one_stream_alone_misses_asks_for_no_node_on_its_behalf() -> None:
    assert latency_share(0.08, 0.08, 0.05) == 0
    assert latency_share(SLOWER * 0.08, 0.08, 0.05) == pytest.approx(1)
    one = Load(running_requests=1, total_blocks=100)
    assert decode_pressure(one, 64, latency_share(0.5, 0.08, 0.05), 0.0) == 1.0


def test_the_fullest_of_seats_and_blocks_counts_and_idle_blocks_do_not() -> None:
    assert decode_pressure(Load(running_requests=32, active_blocks=10, total_blocks=100), 64, 0, 0) == 0.5
    assert decode_pressure(Load(running_requests=2, active_blocks=80, total_blocks=100), 64, 0, 0) == 0.8
    assert decode_pressure(Load(open_grants=2, granted_blocks=40, total_blocks=100), 64, 0, 0) == 0.4
    assert decode_pressure(Load(cached_blocks=100, total_blocks=100), 64, 0, 0) == 0.0


def test_a_prefill_node_has_a_backlog_and_no_decode_pressure() -> None:
    meter = RateMeter(Rates(prefill_tokens_per_s=500.0))
    value = gauges("prefill", Load(waiting_tokens=1250, running_requests=1, total_blocks=10), meter)
    assert value("prefill_backlog_seconds") == 2.5
    assert value("decode_pressure") == 0
    assert prefill_backlog_s(Load(waiting_tokens=10), 0.0) == 10
