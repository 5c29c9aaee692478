"""Every number of a body may be anything: there is an answer, at once, and it names the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import KvferryError
from tests.api_parts import app_of, demo_text
from tests.fake_workers import Bench, decode, prefill

ANSWER_S = 4.0
EDGES = [e + d for e in (0, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 10**400) for d in (-1, 0, 1)]
NUMBERS = st.sampled_from([sign * edge for edge in EDGES for sign in (1, -1)]) | st.floats() | st.integers()
FIELDS = [
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "seed", "n", "logprobs", "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
    *("best_of", "max_completion_tokens", "ignore_eos"),
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Door:
    """A router on fake workers, behind its application; every number that passes the door reaches the nodes' codec."""

    def __init__(self, bench: Bench) -> None:
        app = app_of(bench.cluster, demo_text(), bench.metrics)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")

    async def post(self, path: str, **body: Any) -> httpx.Response:
        base: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
        async with asyncio.timeout(ANSWER_S):
            return await self.http.post(path, content=json.dumps({"max_tokens": 2, **base, **body}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[Door]:
    short = {"max_model_len": 100}
    async with Bench([prefill(changes=short), decode(changes=short)]) as bench:
        yield Door(bench)


def check(response: httpx.Response, param: str) -> None:
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["param"] is None or error["param"].startswith(param), error


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [2**64, -(2**64), 2**63, 10**30])
@pytest.mark.parametrize("field", FIELDS)
async def test_what_no_machine_word_holds_is_refused_by_name(door: Door, path: str, field: str, value: int) -> None:
    unknown = {CHAT: (), COMPLETIONS: ("top_logprobs", "max_completion_tokens")}[path]
    response = await door.post(path, **{field: value})
    assert response.status_code == (200 if field in unknown else 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == field
        assert str(field) in response.json()["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
@given(field=st.sampled_from(FIELDS), value=NUMBERS, path=st.sampled_from([CHAT, COMPLETIONS]), stream=st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_number_gets_an_answer(door: Door, field: str, value: float, path: str, stream: bool) -> None:
    response = await door.post(path, **{"stream": stream, field: value})
    assert response.status_code in (200, 400), response.text


@pytest.mark.asyncio(loop_scope="module")
@given(value=NUMBERS, path=st.sampled_from([CHAT, COMPLETIONS]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_numbers_inside_lists_and_objects(door: Door, value: float, path: str) -> None:
    check(await door.post(path, stop_token_ids=[value]), "stop_token_ids")
    check(await door.post(path, logit_bias={"5": value}), "logit_bias")
    if value == value and abs(value) != float("inf"):
        check(await door.post(path, logit_bias={str(int(value)): 1}), "logit_bias")
    check(await door.post(COMPLETIONS, prompt=[value]), "prompt")
    check(await door.post(COMPLETIONS, prompt=[[1, value]]), "prompt")
    if path == CHAT:
        check(await door.post(path, chat_template_kwargs={"x": value}), "chat_template")
    for name, body in (("/detokenize", {"tokens": [value]}), ("/tokenize", {"add_special_tokens": value})):
        check(await door.post(name, **body), "")


@pytest.mark.parametrize("placed", [[prefill(), decode()], [decode()]], ids=["remote", "local"])
@pytest.mark.parametrize("seed", [2**64, "not a number"])
async def test_what_the_codec_refuses_ends_its_request_at_once(placed: list[Any], seed: Any) -> None:
    """Whatever slips through the door: a request that cannot be sent must not wait for an answer."""

    class Odd:
        """No message: the codec does not know it."""

    async with Bench(placed) as bench, asyncio.timeout(ANSWER_S):
        dispatch = bench.start(8, params={"seed": Odd() if seed == "not a number" else seed})
        with pytest.raises(KvferryError):
            async for _ in dispatch:
                pass
        answer = [output async for output in bench.start(8)]
        assert answer[-1].finish_reason == "length"
