"""POST /v1/embeddings: one job for each input, answers in order, OpenAI's shape and errors."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from kvferry.model_files.pooling_config import PoolingConfig
from kvferry.protocol.errors import KvferryError, NoNodes
from kvferry.protocol.work import Embed
from kvferry.router.api.pooling.pooling_outputs import MAX_CONCURRENT
from kvferry.router.dispatch.interface import Output, RequestSpec
from tests.api_parts import Api, FakeCluster, demo_text, error_of, ids_of, served

WIDTH = 576


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """A made-up vector that tells prompts apart."""
    return [float(len(token_ids)), float(token_ids[0]), 0.5]


def reads(spec: RequestSpec) -> list[Output | KvferryError]:
    found = vector_of(spec.token_ids)
    return [Output((), finish_reason="stop", vector=struct.pack(f"<{len(found)}f", *found))]


def api_of(task: PoolingConfig | None = None, **settings: Any) -> Api:
    text = demo_text() if task is None else replace(demo_text(), task=task)
    return Api(FakeCluster(reads, **settings), text)


async def embed(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/embeddings", json=body)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("Hello there", [ids_of("Hello there")]),
        (["one", "two three"], [ids_of("one"), ids_of("two three")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [9]], [[5, 6], [9]]),
    ],
)
async def test_each_kind_of_input_becomes_jobs_in_order(given: Any, wanted: list[list[int]]) -> None:
    api = api_of(cached=1)
    answer = await embed(api, input=given)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [dispatch.spec.token_ids for dispatch in api.cluster.dispatches] == [tuple(ids) for ids in wanted]
    assert all(dispatch.spec.work == Embed("last", True, 0) for dispatch in api.cluster.dispatches)
    assert [item["index"] for item in body["data"]] == list(range(len(wanted)))
    assert [item["embedding"] for item in body["data"]] == [vector_of(ids) for ids in wanted]
    count = sum(map(len, wanted))
    assert body["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": {"cached_tokens": len(wanted)},
    }
    assert body["model"] == "SmolLM2-135M-Instruct"
    assert answer.headers["x-kvferry-route"].startswith("prefill=p0")
    assert api.sample("kvferry_prompt_tokens_total", source="reused_prefill") == len(wanted)


async def test_base64_is_little_endian_float32() -> None:
    answer = await embed(api_of(), input="Hello", encoding_format="base64")
    data = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == vector_of(ids_of("Hello"))


def test_the_official_client_reads_it() -> None:
    api = api_of()
    with served(api.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        made = client.embeddings.create(model="SmolLM2-135M-Instruct", input=["a", "b c"], dimensions=3)
        assert [item.embedding for item in made.data] == [vector_of(ids_of("a")), vector_of(ids_of("b c"))]
        assert made.usage.prompt_tokens == made.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="SmolLM2-135M-Instruct", input="a", dimensions=WIDTH + 1)
        assert caught.value.param == "dimensions"
        assert str(WIDTH) in caught.value.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", [1]]}, None),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [49_152]}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": list(range(1, 66))}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
async def test_a_mistake_names_its_field(body: dict[str, Any], field: str | None) -> None:
    api = api_of(max_model_len=64)
    answer = await embed(api, **body)
    if field is None:
        assert answer.status_code == 200
        return
    assert answer.status_code in (400, 404)
    assert error_of(answer)["param"] == field
    assert not api.cluster.dispatches


async def test_truncation_keeps_the_beginning_and_what_closes_a_text() -> None:
    api = api_of(max_model_len=64)
    await embed(api, input=list(range(1, 100)), truncate_prompt_tokens=-1)
    await embed(api, input=list(range(1, 100)), truncate_prompt_tokens=7)
    assert [dispatch.spec.token_ids for dispatch in api.cluster.dispatches] == [tuple(range(1, 65)), tuple(range(1, 8))]


async def test_the_model_s_files_and_the_body_say_how() -> None:
    api = api_of(PoolingConfig("embed", encoder=True, pooling="mean", normalize=False, width=8))
    await embed(api, input="a", dimensions=8)
    await embed(api, input="a", normalize=True, cache_salt="x")
    works = [dispatch.spec.work for dispatch in api.cluster.dispatches]
    assert works == [Embed("mean", False, 8), Embed("mean", True, 0)]
    assert api.cluster.dispatches[1].spec.namespace.endswith(":x")


async def test_a_model_that_only_classifies_says_so() -> None:
    answer = await embed(api_of(PoolingConfig("classify", encoder=True, labels=("a", "b"))), input="a")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "model"
    assert "does not embed: it is an encoder with a head of 2 labels" in error_of(answer)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_encoder_generates_nothing(path: str) -> None:
    api = api_of(PoolingConfig("embed", encoder=True))
    answer = await api.http.post(path, json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 400
    assert "does not generate: it is an encoder" in error_of(answer)["message"]
    assert not api.cluster.dispatches


async def test_no_more_than_a_window_is_with_the_nodes() -> None:
    api = api_of(gap_s=0.01)
    asked = asyncio.create_task(embed(api, input=[[1]] * (3 * MAX_CONCURRENT)))
    most = 0
    while not asked.done():
        running = sum(not dispatch.yielded for dispatch in api.cluster.dispatches)
        most = max(most, running)
        await asyncio.sleep(0.001)
    assert len((await asked).json()["data"]) == 3 * MAX_CONCURRENT
    assert 1 < most <= MAX_CONCURRENT


async def test_the_first_failure_ends_all_and_is_the_answer() -> None:
    def script(spec: RequestSpec) -> list[Output | KvferryError]:
        return [NoNodes("nobody is there", retry_after=2.0)] if spec.token_ids == (2,) else reads(spec)

    api = Api(FakeCluster(script))
    answer = await embed(api, input=[[1], [2], [3]])
    assert answer.status_code == 503
    assert error_of(answer)["message"] == "nobody is there"
    assert answer.headers["retry-after"] == "2"


async def test_an_answer_without_a_vector_is_an_error_and_no_empty_vector() -> None:
    answer = await embed(Api(FakeCluster(lambda spec: [Output((), finish_reason="stop")])), input="a")
    assert answer.status_code == 500


async def test_answers_are_as_documented() -> None:
    api = api_of()
    document = (await api.http.get("/openapi.json")).json()
    for path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):
        described = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        body = {"input": "a", "query": "a", "text_1": "a", "text_2": "b", "documents": ["c", "d"]}
        answer = await api.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), {**described, "components": document["components"]})
