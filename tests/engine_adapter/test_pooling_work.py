"""Embeddings and logits through an engine: what is measured, what is refused by name, and what routers get."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.engine_adapter.attempts import Attempts
from kvferry.engine_adapter.engines.listed_vectors import LlamaCppPooling, SglangPooling
from kvferry.engine_adapter.engines.vllm import VllmPooling
from kvferry.engine_adapter.measured_pooling import MeasuredPooling, measured_pooling
from kvferry.engine_adapter.pooling_engine import PoolingCall, PoolingTask
from kvferry.engine_adapter.pooling_work import PoolingWork, pooling_of
from kvferry.protocol.errors import InvalidRequest, KvferryError, Overloaded, StepFailed
from kvferry.protocol.messages import AttemptFailed, Job, StepFrame, TokenDelta
from kvferry.protocol.work import Classify, Embed, Work
from tests.engine_adapter.mock_behaviour import Behaviour
from tests.engine_adapter.mock_pooling import WIDTH, toy_vector
from tests.engine_adapter.mock_vllm import app_of
from tests.waiting import until

TOKENS = (5, 6, 7)


class AppHttp:
    """Posts to the mock of vLLM, in this process."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app_of(behaviour)), base_url="http://engine")

    async def post(self, path: str, body: Any, silence_s: float | None) -> Any:
        answer = await self._client.post(path, json=body)
        if answer.status_code == 400:
            raise InvalidRequest(answer.text)
        if answer.status_code == 503:
            raise Overloaded(answer.text, retry_after=1.0)
        if answer.status_code != 200:
            raise StepFailed(answer.text)
        return answer.json()


class Canned:
    """Answers each request with the same JSON."""

    def __init__(self, told: Any) -> None:
        self.told, self.path, self.body = told, "", dict[str, Any]()

    async def post(self, path: str, body: Any, silence_s: float | None) -> Any:
        self.path, self.body = path, body
        return self.told


class Engine:
    """An engine of which only the pooling part is used."""

    def __init__(self, pooling: Any) -> None:
        self.pooling = pooling

    def check(self, job: Job) -> None:
        raise AssertionError("an engine checks only jobs that generate")


def vllm(**behaviour: Any) -> VllmPooling:
    return VllmPooling(AppHttp(Behaviour(**behaviour)), lambda: "toy")  # type: ignore[arg-type]


def job(work: Work, **more: Any) -> Job:
    return Job("r", 0, TOKENS, len(TOKENS), work, "one", **more)


def scaled(numbers: list[float]) -> list[float]:
    return [each / math.hypot(*numbers) for each in numbers]


async def vector(work: Work, engine: VllmPooling, measured: MeasuredPooling) -> list[float]:
    pooling = PoolingWork(engine, measured, "last")
    pooling.check(job(work))
    delta = await pooling.delta(job(work), "r-0-1", "")
    assert (delta.token_ids, delta.finish_reason) == ((), "stop")
    assert delta.reuse is not None
    assert delta.reuse.balanced
    return list(array("f", delta.vector or b""))


@pytest.mark.parametrize(
    ("behaviour", "tasks"),
    [
        ({"pools": "embed"}, ("embed",)),
        ({"pools": "classify"}, ("classify",)),
        ({}, ()),
        ({"pools": "embed", "pooling_fault": "nan"}, ()),
        ({"pools": "embed", "pooling_fault": "short"}, ()),
        ({"pools": "embed", "pooling_fault": "refuse"}, ()),
    ],
)
async def test_what_an_engine_makes_of_prompts_is_measured(behaviour: dict[str, Any], tasks: tuple[PoolingTask, ...]):
    measured = await measured_pooling(Engine(vllm(**behaviour)))  # type: ignore[arg-type]
    assert measured == MeasuredPooling(tasks, scaled=False)


async def test_vectors_that_are_always_scaled_are_known():
    class Scaled:
        async def pool(self, task: PoolingTask, call: PoolingCall) -> array[float]:
            if task == "classify":
                raise InvalidRequest("no")
            return array("f", scaled(toy_vector(call.token_ids)))

    measured = await measured_pooling(Engine(Scaled()))  # type: ignore[arg-type]
    assert measured == MeasuredPooling(("embed",), scaled=True)
    work = PoolingWork(Scaled(), measured, "last")
    work.check(job(Embed()))
    with pytest.raises(InvalidRequest, match="normalize") as caught:
        work.check(job(Embed(normalize=False)))
    assert caught.value.param == "normalize"


async def test_a_vector_is_cut_and_then_scaled():
    measured, engine = MeasuredPooling(("embed",)), vllm(pools="embed")
    whole = toy_vector(TOKENS)
    assert await vector(Embed(normalize=False), engine, measured) == pytest.approx(whole)
    assert await vector(Embed(), engine, measured) == pytest.approx(scaled(whole))
    assert await vector(Embed(dimensions=3), engine, measured) == pytest.approx(scaled(whole[:3]))
    assert len(await vector(Embed(), engine, measured)) == WIDTH


async def test_logits_come_without_an_activation():
    found = await vector(Classify(), vllm(pools="classify"), MeasuredPooling(("classify",)))
    assert found == pytest.approx(toy_vector(TOKENS, 1))


@pytest.mark.parametrize(
    ("work", "pooling", "told"),
    [
        (Classify(), "last", "only generates"),
        (Embed("mean"), "last", "pools by last"),
        (Embed(), "", "--engine-pooling"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(work: Work, pooling: str, told: str):
    with pytest.raises(InvalidRequest, match=told) as caught:
        PoolingWork(vllm(), MeasuredPooling(("embed",)), pooling).check(job(work))
    assert caught.value.param == "model"


def test_pairs_whose_second_text_is_marked_are_refused():
    with pytest.raises(InvalidRequest, match="pairs"):
        PoolingWork(vllm(), MeasuredPooling(("classify",)), "").check(job(Classify(second_from=2)))


async def test_a_vector_that_is_not_finite_fails_its_request_alone():
    pooling = PoolingWork(vllm(pools="embed", pooling_fault="nan"), MeasuredPooling(("embed",)), "last")
    with pytest.raises(StepFailed, match="finite"):
        await pooling.delta(job(Embed()), "r-0-1", "")
    short = PoolingWork(vllm(pools="embed", pooling_fault="short"), MeasuredPooling(("embed",)), "last")
    with pytest.raises(StepFailed):
        await short.delta(job(Embed()), "r-0-1", "")


async def test_vllm_is_sent_tokens_salt_and_adapter():
    canned = Canned({"data": [{"data": "AACAPw=="}]})
    call = PoolingCall("r-0-1", TOKENS, adapter="lora", cache_salt="tenant")
    found = await VllmPooling(canned, lambda: "toy").pool("embed", call)  # type: ignore[arg-type]
    assert list(found) == [1.0]
    assert (canned.path, canned.body["input"]) == ("/pooling", TOKENS)
    assert (canned.body["model"], canned.body["cache_salt"]) == ("lora", "tenant")


async def test_llamacpp_and_sglang_embed_tokens():
    call = PoolingCall("r-0-1", TOKENS, cache_salt="tenant")
    canned = Canned({"data": [{"index": 0, "embedding": [1.0, 2.0]}]})
    assert list(await LlamaCppPooling(canned).pool("embed", call)) == [1.0, 2.0]  # type: ignore[arg-type]
    assert canned.body == {"input": TOKENS, "embd_normalize": -1}
    for told in ({"embedding": [3.0, 4.0]}, [{"embedding": [3.0, 4.0]}]):
        canned = Canned(told)
        assert list(await SglangPooling(canned).pool("embed", call)) == [3.0, 4.0]  # type: ignore[arg-type]
    assert canned.body == {"rid": "r-0-1", "input_ids": TOKENS, "cache_salt": "tenant"}
    for odd in (None, {}, {"embedding": ["a"]}, {"embedding": None}):
        with pytest.raises(StepFailed):
            await SglangPooling(Canned(odd)).pool("embed", call)  # type: ignore[arg-type]
    for engine in (LlamaCppPooling(canned), SglangPooling(canned)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await engine.pool("classify", call)


class Frames:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.deltas, self.failed = list[TokenDelta](), list[AttemptFailed]()

    def publish(self, router_id: str, frame: StepFrame) -> None:
        self.deltas += frame.deltas
        self.failed += frame.failed


def attempts(frames: Frames, engine: VllmPooling, counted: Callable[[str], None]) -> Attempts:
    async def suspect(error: KvferryError) -> None:
        """The engine is well."""

    work = PoolingWork(engine, MeasuredPooling(("embed",)), "last")
    return Attempts(Engine(engine), frames, (), {}, work, suspect=suspect, counted=counted)  # type: ignore[arg-type]


async def ended(frames: Frames) -> None:
    await until(lambda: bool(frames.deltas or frames.failed))


async def test_an_attempt_ends_with_its_vector():
    frames, counted = Frames(), list[str]()
    attempts(frames, vllm(pools="embed"), counted.append).start(job(Embed(normalize=False)))
    await ended(frames)
    (delta,) = frames.deltas
    assert list(array("f", delta.vector or b"")) == pytest.approx(toy_vector(TOKENS))
    await asyncio.sleep(0)
    assert counted == ["done"]


async def test_an_attempt_whose_engine_refuses_fails():
    frames, counted = Frames(), list[str]()
    attempts(frames, vllm(pools="embed", pooling_fault="nan"), counted.append).start(job(Embed()))
    await ended(frames)
    assert [failed.code for failed in frames.failed] == ["step_failed"]


async def test_an_engine_that_only_generates_takes_no_embeddings():
    made = Attempts(Engine(None), Frames(), (), {}, suspect=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="only generates"):
        made.start(job(Embed()))


def test_the_pooling_is_that_of_the_models_files(tmp_path: Path):
    assert pooling_of("nowhere/at-all", "mean") == "mean"
    assert pooling_of(str(tmp_path / "gone"), "auto") == ""
    assert pooling_of("smollm2", "auto") == "last"
