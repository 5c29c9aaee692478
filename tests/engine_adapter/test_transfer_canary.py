"""Canary checks of transferred prompts: which are checked, how, and when a node is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.engine_adapter.transfer import Transfer
from kvferry.engine_adapter.transfer_canary import TransferCanary
from kvferry.protocol.errors import StepFailed
from kvferry.protocol.messages import Deviation, Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate

RIGHT = (50, 51, 52)
ALL = ("greedy_replay", "seeded_replay", "batch_invariant")
SENDER = ("p", 3)


class Local:
    """An engine that computes the right tokens."""

    def __init__(self) -> None:
        self.calls, self.fails, self.going = list[EngineCall](), False, asyncio.Event()
        self.going.set()

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        self.calls.append(call)
        await self.going.wait()
        if self.fails:
            raise StepFailed("no")
        deliver(EngineDelta(RIGHT[: call.params.max_tokens], None, "length"))


class Bench:
    def __init__(self, rate: float = 1.0, kept: tuple[str, ...] = ALL, draw: float = 0.5) -> None:
        self.engine, self.reports, self.outcomes = Local(), list[tuple[str, Deviation]](), list[str]()
        engine: Any = self.engine
        self.canary = TransferCanary(
            engine, rate, kept, lambda router, told: self.reports.append((router, told)),
            lambda outcome, sender: self.outcomes.append(outcome), lambda: draw,
        )  # fmt: skip

    async def arrives(self, tokens: tuple[int, ...] = RIGHT, sender: tuple[str, int] = SENDER, **params: Any) -> None:
        work = Generate(SamplingParams(**{"temperature": 0.0, "max_tokens": 100, "logprobs": 3, **params}))
        job = Job("r", 1, (1, 2, 3), 3, work, "router", namespace="tenant")
        call = EngineCall("r-1-1", (1, 2, 3), job.params, cache_salt="tenant", reference="blocks")
        transfer = Transfer(sender, "blocks", 3, tokens[0], 0.0, True, tokens=list(tokens))
        self.canary.arrived(job, call, transfer)
        await asyncio.sleep(0.01)


async def test_the_prompt_is_computed_without_the_blocks_and_without_what_is_cached() -> None:
    bench = Bench()
    await bench.arrives()
    await bench.arrives()
    first, second = bench.engine.calls
    assert (first.reference, first.token_ids, first.params.max_tokens) == ("", (1, 2, 3), len(RIGHT))
    assert len({first.cache_salt, second.cache_salt, "tenant"}) == 3
    assert (bench.outcomes, bench.reports) == (["agreed", "agreed"], [])


async def test_a_difference_behind_the_first_token_is_reported_with_its_sender() -> None:
    bench = Bench()
    await bench.arrives((50, 51, 99))
    assert bench.reports == [("router", Deviation("r", SENDER))]
    assert bench.outcomes == ["differed"]


async def test_an_engine_whose_tokens_depend_on_the_batch_must_differ_twice_in_a_row() -> None:
    bench = Bench(kept=("greedy_replay",))
    wrong = (50, 51, 99)
    await bench.arrives(wrong)
    await bench.arrives()
    await bench.arrives(wrong)
    assert bench.reports == []
    await bench.arrives(wrong)
    assert len(bench.reports) == 1
    assert bench.outcomes == ["differed", "agreed", "differed", "differed"]


async def test_a_sender_is_checked_until_it_agrees_and_then_by_chance() -> None:
    bench = Bench(rate=0.4, draw=0.5)
    await bench.arrives()
    await bench.arrives()
    await bench.arrives(sender=("q", 1))
    assert bench.outcomes == ["agreed", "agreed"]


@pytest.mark.parametrize(
    ("rate", "kept", "params"),
    [(0.0, ALL, {}), (1.0, ("seeded_replay",), {}), (1.0, ("greedy_replay",), {"temperature": 0.5})],
)
async def test_what_cannot_be_compared_is_not_computed(
    rate: float, kept: tuple[str, ...], params: dict[str, Any]
) -> None:
    bench = Bench(rate, kept)
    await bench.arrives(**params)
    assert bench.engine.calls == []


async def test_there_is_one_check_at_a_time_and_a_failed_one_says_nothing() -> None:
    bench = Bench()
    bench.engine.going.clear()
    await bench.arrives()
    await bench.arrives((50, 99))
    bench.engine.fails = True
    bench.engine.going.set()
    await asyncio.sleep(0.01)
    assert (len(bench.engine.calls), bench.outcomes, bench.reports) == (1, ["dropped"], [])
    bench.engine.fails = False
    await bench.arrives((50, 99))
    assert len(bench.reports) == 1
