"""Attempts on an engine: how they end, what routers are told, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvferry.engine_adapter.attempts import Attempts
from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.protocol.errors import AdapterNotLoaded, KvferryError, NodeDown, Overloaded, StepFailed
from kvferry.protocol.messages import AttemptFailed, CancelRequest, Job, StepFrame, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.waiting import until

Script = Callable[[EngineCall, Callable[[EngineDelta], None]], Awaitable[None]]


class ScriptedEngine:
    """Runs the script for each call."""

    def __init__(self, script: Script) -> None:
        self.script, self.calls, self.dropped = script, list[EngineCall](), 0

    def check(self, job: Job) -> None:
        """Everything can be done."""

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        self.calls.append(call)
        try:
            await self.script(call, deliver)
        except asyncio.CancelledError:
            self.dropped += 1
            raise


class Streams:
    """Keeps what is published, by router."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, StepFrame]] = []

    def publish(self, router_id: str, frame: StepFrame) -> None:
        self.frames.append((router_id, frame))

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for _, frame in self.frames for delta in frame.deltas]

    @property
    def failed(self) -> list[AttemptFailed]:
        return [failed for _, frame in self.frames for failed in frame.failed]


def job(request_id: str = "r", attempt: int = 0, router: str = "one", deadline_s: float = 60.0, **more: Any) -> Job:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    return Job(request_id, attempt, (1, 2, 3), 3, Generate(params), router, deadline_s=deadline_s, **more)


async def well(error: KvferryError) -> None:
    """The engine is well after each error."""


def attempts_of(script: Script, suspect: Callable[[KvferryError], Awaitable[None]] = well, **more: Any) -> Any:
    streams: Any = Streams()
    engine: Any = ScriptedEngine(script)
    outcomes: list[str] = []
    made = Attempts(
        engine, streams, ("greedy_resume",), {"id": "lora"}, suspect=suspect, counted=outcomes.append, **more
    )
    return made, streams, engine, outcomes


async def three(call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
    deliver(EngineDelta((10,)))
    deliver(EngineDelta((11,)))
    await asyncio.sleep(0)
    deliver(EngineDelta((12,), None, "length", 2))


async def forever(call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
    deliver(EngineDelta((10,)))
    await asyncio.Event().wait()


async def test_the_output_of_one_turn_is_one_frame():
    made, streams, _, outcomes = attempts_of(three)
    made.start(job())
    await until(lambda: outcomes)
    await asyncio.sleep(0)
    assert [[delta.token_ids for delta in frame.deltas] for _, frame in streams.frames] == [[(10,), (11,)], [(12,)]]
    assert streams.deltas[-1].reuse.cached_len == 2
    assert outcomes == ["done"]
    assert made.running == 0


async def test_each_router_gets_its_own_output_alone():
    made, streams, _, outcomes = attempts_of(three)
    made.start(job("a", router="one"))
    made.start(job("b", router="two"))
    await until(lambda: len(outcomes) == 2)
    await asyncio.sleep(0)
    for router, frame in streams.frames:
        assert {delta.request_id for delta in frame.deltas} == {"a" if router == "one" else "b"}


async def test_a_cancel_drops_the_call_and_is_told():
    made, streams, engine, outcomes = attempts_of(forever)
    made.start(job())
    await until(lambda: streams.deltas)
    made.cancel(CancelRequest("r", 0))
    await until(lambda: outcomes)
    await asyncio.sleep(0)
    assert engine.dropped == 1
    assert [failed.code for failed in streams.failed] == ["cancelled"]
    assert made.running == 0


async def test_a_cancel_in_the_turn_of_the_start_leaves_nothing_behind():
    made, streams, engine, outcomes = attempts_of(forever)
    made.start(job())
    made.cancel(CancelRequest("r", 0))
    await until(lambda: made.running == 0)
    await asyncio.sleep(0)
    assert (engine.calls, outcomes) == ([], ["cancelled"])
    assert [failed.code for failed in streams.failed] == ["cancelled"]


async def test_an_attempt_that_comes_after_its_cancel_never_begins():
    made, _, engine, _ = attempts_of(forever)
    made.cancel(CancelRequest("r", 1))
    made.start(job(attempt=1))
    await asyncio.sleep(0.01)
    assert (engine.calls, made.running) == ([], 0)
    made.start(job(attempt=2))
    await until(lambda: engine.calls)


async def test_an_attempt_that_is_sent_twice_runs_once():
    made, _, engine, _ = attempts_of(forever)
    made.start(job())
    made.start(job())
    await asyncio.sleep(0.01)
    assert len(engine.calls) == 1


async def test_the_requests_of_a_lost_router_are_dropped():
    made, _, engine, _ = attempts_of(forever)
    made.start(job("a", router="one"))
    made.start(job("b", router="two"))
    await until(lambda: len(engine.calls) == 2)
    made.router_lost("one")
    await until(lambda: engine.dropped == 1)
    assert made.running == 1


async def test_a_deadline_ends_the_call():
    made, streams, engine, outcomes = attempts_of(forever)
    made.start(job(deadline_s=0.05))
    await until(lambda: outcomes)
    await asyncio.sleep(0)
    assert [failed.code for failed in streams.failed] == ["deadline_exceeded"]
    assert engine.dropped == 1


async def test_a_failed_step_is_told_once_the_engine_is_known_to_be_well():
    asked: list[KvferryError] = []

    async def fails(call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        raise StepFailed("no")

    async def suspect(error: KvferryError) -> None:
        asked.append(error)

    made, streams, _, outcomes = attempts_of(fails, suspect)
    made.start(job())
    await until(lambda: outcomes)
    await asyncio.sleep(0)
    assert [failed.code for failed in streams.failed] == ["step_failed"]
    assert len(asked) == 1


async def test_nothing_is_told_of_requests_on_an_engine_that_is_gone():
    """Their routers must see a node that died: two failed steps would end a request for good."""

    async def breaks(call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        raise NodeDown("the connection was closed")

    async def gone(error: KvferryError) -> None:
        await asyncio.Event().wait()

    made, streams, engine, _ = attempts_of(breaks, gone)
    made.start(job())
    await until(lambda: engine.calls)
    await asyncio.sleep(0.05)
    assert streams.frames == []


async def test_a_bug_of_the_client_ends_its_request_alone():
    async def wrong(call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        raise KeyError("choices")

    made, streams, _, outcomes = attempts_of(wrong)
    made.start(job())
    await until(lambda: outcomes)
    await asyncio.sleep(0)
    assert [failed.code for failed in streams.failed] == ["server_error"]
    assert outcomes == ["failed"]


async def test_an_unknown_adapter_and_too_many_attempts_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.engine_adapter.attempt_table.MAX_ATTEMPTS", 2)
    made, _, engine, _ = attempts_of(forever)
    with pytest.raises(AdapterNotLoaded):
        made.start(job(adapter="other"))
    made.start(job("a", adapter="id"))
    made.start(job("b"))
    with pytest.raises(Overloaded):
        made.start(job("c"))
    await until(lambda: len(engine.calls) == 2)
    assert [call.adapter for call in engine.calls] == ["lora", ""]


async def test_rates_are_learned_from_prompts_that_ran_alone():
    async def slow(call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        await asyncio.sleep(0.05)
        deliver(EngineDelta((10,)))
        await asyncio.sleep(0.02)
        deliver(EngineDelta((11,), None, "length", 0))

    made, _, _, outcomes = attempts_of(slow)
    before = made.rates.rates
    prompt = tuple(range(1000))
    long = Job("r", 0, prompt, len(prompt), job().work, "one")
    made.start(long)
    await until(lambda: outcomes)
    assert before.prefill_tokens_per_s < made.rates.rates.prefill_tokens_per_s < 20_000
    assert made.rates.rates.step_s != before.step_s
