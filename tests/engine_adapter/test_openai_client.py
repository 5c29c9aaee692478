"""The client of OpenAI servers: what it asks for, how it reads each kind of server, and what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.engine_adapter.engines.openai import OpenaiEngine
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.measured_guarantees import Measurement
from kvferry.protocol.errors import ConfigError, InvalidRequest, NodeDown, NodeLost, Overloaded, StepFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Grammar
from kvferry.runtime.http import bind, make_server
from tests.engine_adapter.mock_openai import EOS, Behaviour, app_of, expected, tokenizer
from tests.waiting import until

PROMPT = tuple(range(1000, 1020))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=3, eos_token_ids=(EOS,))
FORMS = ["token_ids", "tokens", "text"]


@asynccontextmanager
async def served(
    key: str = "", needs: str = "", model: str = "", files: str | None = None, **behaviour: Any
) -> AsyncIterator[Any]:
    """A mock with its client, whose facts are read, and how the mock behaves."""
    how = Behaviour(**behaviour, key=needs)
    socket = bind("127.0.0.1", 0)
    server = make_server(app_of(how), {})
    task = asyncio.create_task(server.serve(sockets=[socket]))
    await until(lambda: server.started)
    http = EngineHttp(f"http://127.0.0.1:{socket.getsockname()[1]}", lambda: key)
    engine = OpenaiEngine(http, model, ("smollm2" if how.form == "text" else "") if files is None else files)
    try:
        yield engine, await engine.facts(), how
    finally:
        await engine.close()
        server.should_exit = True
        await task


async def answered(engine: OpenaiEngine, params: SamplingParams = PARAMS, **more: Any) -> list[EngineDelta]:
    deltas: list[EngineDelta] = []
    await engine.generate(EngineCall("r-0-1", PROMPT, params, **more), deltas.append)
    return deltas


def tokens_of(deltas: list[EngineDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine_adapter.engines.openai.CREATED_S", 0.01)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_event", [1, 3])
async def test_each_form_is_recognised_and_read(form: str, per_event: int) -> None:
    async with served(form=form, per_event=per_event) as (engine, facts, _):
        deltas = await answered(engine)
    assert facts.exact is (form != "text")
    assert (facts.kind, facts.version, facts.served_names, facts.max_model_len) == ("openai", "fp_1", ("toy",), 4096)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].cached_tokens == 2
    if facts.exact:
        assert tokens_of(deltas) == expected(list(PROMPT), 8)
    assert tokenizer().decode(tokens_of(deltas)) == tokenizer().decode(expected(list(PROMPT), 8))


async def test_a_server_of_text_keeps_nothing_exactly() -> None:
    async with served(form="text") as (engine, facts, _):
        assert await Measurement(engine, exact=facts.exact).guarantees() == ()
    async with served() as (engine, facts, _):
        assert {"greedy_resume", "greedy_replay"} <= {*await Measurement(engine, exact=facts.exact).guarantees()}


@pytest.mark.parametrize("form", FORMS)
async def test_the_end_of_a_message_is_a_stop(form: str) -> None:
    async with served(form=form, eos_after=5) as (engine, _, _):
        deltas = await answered(engine)
    assert deltas[-1].finish_reason == "stop"
    assert tokens_of(deltas)[-1] == EOS
    assert tokenizer().decode(tokens_of(deltas)) == tokenizer().decode(expected(list(PROMPT), 5))


async def test_a_stop_token_ends_the_output_and_the_servers_work() -> None:
    """The API has no stop tokens: where the server tells ids, the adapter looks for them itself."""
    stop = expected(list(PROMPT), 3)[-1]
    params = dataclasses.replace(PARAMS, stop_token_ids=(stop,), max_tokens=1000)
    async with served(step_s=0.005) as (engine, _, _):
        deltas = await answered(engine, params)
        assert (tokens_of(deltas), deltas[-1].finish_reason) == (expected(list(PROMPT), 3), "stop")
        engine.check(Job("r", 0, PROMPT, 20, Generate(params), "router"))
        counts = await mocked(engine)
        await until_idle(engine)
        assert counts["asked"][-1]["max_tokens"] == 1000


async def mocked(engine: OpenaiEngine, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = await engine._http.post("/mock", changes)
    return found


async def until_idle(engine: OpenaiEngine) -> None:
    async with asyncio.timeout(1):
        while (await mocked(engine))["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_only_what_the_api_names_is_sent_and_more_only_where_it_is_accepted() -> None:
    params = dataclasses.replace(PARAMS, presence_penalty=0.5, logit_bias=((7, 1.5),), logprobs=2, temperature=0.7,
                                 top_p=0.9)  # fmt: skip
    named = {"model": "toy", "prompt": list(PROMPT), "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 3,
             "stream": True, "stream_options": {"include_usage": True}, "presence_penalty": 0.5,
             "logit_bias": {"7": 1.5}, "logprobs": 2}  # fmt: skip
    async with served() as (engine, _, _):
        await answered(engine, params, cache_salt="tenant")
        assert (await mocked(engine))["asked"][-1] == {
            **named, "return_token_ids": True, "return_tokens_as_token_ids": True, "cache_salt": "tenant",
        }  # fmt: skip
    async with served(strict=True, form="text") as (engine, facts, _):
        assert facts.exact is False
        await answered(engine, params, cache_salt="tenant")
        assert (await mocked(engine))["asked"][-1] == named


@pytest.mark.parametrize("form", FORMS)
async def test_logprobs_belong_to_the_tokens(form: str) -> None:
    async with served(form=form, per_event=2) as (engine, facts, _):
        deltas = await answered(engine, dataclasses.replace(PARAMS, logprobs=1))
    ids, rows = tokens_of(deltas), [row for delta in deltas for row in delta.logprobs or ()]
    assert [row.token_id for row in rows] == ids
    assert sum(row.logprob for row in rows) == pytest.approx(-0.5 * 8)
    if facts.exact:
        assert all((row.logprob, row.rank) == (-0.5, 2) for row in rows)
        assert all(row.top == ((row.token_id + 1, -0.25),) for row in rows)


@pytest.mark.parametrize(
    ("changes", "grammar", "name"),
    [
        ({"top_k": 5}, None, "top_k"),
        ({"min_p": 0.1}, None, "min_p"),
        ({"repetition_penalty": 1.1}, None, "repetition_penalty"),
        ({"min_tokens": 2}, None, "min_tokens"),
        ({"bad_words": ((1, 2),)}, None, "bad_words"),
        ({"allowed_token_ids": (1,)}, None, "allowed_token_ids"),
        ({"prompt_logprobs": 1}, None, "prompt_logprobs"),
        ({"ignore_eos": True}, None, "ignore_eos"),
        ({"logprobs": 6}, None, "logprobs"),
        ({"stop_token_ids": (8,)}, None, "stop_token_ids"),
        ({}, Grammar("json_object", ""), "grammar"),
    ],
)
async def test_what_the_api_does_not_name_is_refused(changes: Any, grammar: Grammar | None, name: str) -> None:
    params = dataclasses.replace(PARAMS, **changes)
    async with served(form="text") as (engine, _, _):
        with pytest.raises(InvalidRequest, match="engine") as refused:
            engine.check(Job("r", 0, (1,), 1, Generate(params, grammar), "router"))
        assert refused.value.param == name
        engine.check(Job("r", 0, (1,), 1, Generate(PARAMS), "router"))
        engine.check(Job("r", 0, (1,), 1, Generate(dataclasses.replace(PARAMS, top_k=-1, logprobs=5)), "router"))


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("error_event", StepFailed, "out of memory"),
        ("old_error", StepFailed, "out of memory"),
        ("no_finish", StepFailed, "without a finish reason"),
        ("html", StepFailed, "without a finish reason"),
        ("whole", StepFailed, "without a finish reason"),
        ("odd", StepFailed, "text without token ids"),
        ("odder", StepFailed, "cannot be read"),
        ("abort", StepFailed, "ended the request: abort"),
        ("no_json", NodeLost, "JSONDecodeError"),
        ("huge_line", NodeLost, "too long"),
        ("cut", NodeDown, "connection"),
        ("refuse", Overloaded, "busy"),
        ("limited", Overloaded, "slow down"),
    ],
)
async def test_a_fault_is_told_as_what_it_is(fault: str, kind: type[Exception], told: str) -> None:
    async with served() as (engine, _, how):
        how.fault = fault
        with pytest.raises(kind, match=told):
            await answered(engine)
        how.fault = ""
        assert tokens_of(await answered(engine)) == expected(list(PROMPT), 8)


async def test_an_answer_without_its_done_is_whole() -> None:
    async with served() as (engine, _, how):
        how.fault = "no_done"
        deltas = await answered(engine)
    assert (tokens_of(deltas), deltas[-1].cached_tokens) == (expected(list(PROMPT), 8), None)


async def test_a_cancelled_call_ends_the_servers_work() -> None:
    async with served(step_s=0.01) as (engine, _, _):
        task = asyncio.create_task(answered(engine, dataclasses.replace(PARAMS, max_tokens=1000)))
        while not (await mocked(engine))["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await engine.load()).running_requests == 1
        task.cancel()
        await until_idle(engine)
        assert (await engine.load()).running_requests == 0


@pytest.mark.parametrize(
    ("behaviour", "more", "told"),
    [
        ({"takes_ids": False}, {}, "refuses token ids as the prompt.*must be a string"),
        ({"form": "text"}, {"files": ""}, "name its tokenizer"),
        ({"max_model_len": 0}, {"files": ""}, "context length"),
        ({"models": ("a", "b")}, {}, "one of the models that the server serves: a, b"),
        ({}, {"model": "other"}, "one of the models that the server serves: toy"),
    ],
)
async def test_a_server_that_cannot_be_used_is_told_with_the_reason(behaviour: Any, more: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        async with served(**more, **behaviour):
            pass


async def test_a_server_of_several_models_is_asked_for_the_named_one() -> None:
    async with served(model="b", models=("a", "b"), max_model_len=0, files="smollm2") as (engine, facts, _):
        await answered(engine)
        assert (await mocked(engine))["asked"][-1]["model"] == "b"
    assert (facts.served_names, facts.max_model_len) == (("b",), 8192)


async def test_the_key_is_sent_with_each_request_and_a_wrong_one_is_told() -> None:
    async with served(key="secret", needs="secret") as (engine, _, _):
        assert tokens_of(await answered(engine)) == expected(list(PROMPT), 8)
    with pytest.raises(StepFailed, match="401: Incorrect API key"):
        async with served(key="wrong", needs="secret"):
            pass


async def test_a_server_without_health_is_well_while_it_lists_its_models() -> None:
    async with served(health=False) as (engine, _, how):
        await engine.health()
        how.models = ()
        await engine.health()
    with pytest.raises(NodeDown):
        await engine.health()


async def test_a_health_that_was_good_and_fails_is_an_end() -> None:
    async with served() as (engine, _, how):
        await engine.health()
        how.health = False
        with pytest.raises(NodeDown, match="unhealthy"):
            await engine.health()


async def test_a_restarted_server_is_another_process_where_it_tells_its_start() -> None:
    async with served(created="start") as (engine, facts, how):
        assert facts.process
        assert (await engine.load()).process == facts.process
        how.created = "now"
        await asyncio.sleep(1.1)
        assert (await engine.load()).process != facts.process


async def test_a_time_of_creation_that_is_always_now_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine_adapter.engines.openai.CREATED_S", 1.1)
    async with served(created="now") as (engine, facts, _):
        assert facts.process == (await engine.load()).process == ""
