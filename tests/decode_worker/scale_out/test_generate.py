"""vLLM's API of token ids on a decode node: answers equal those of the router's path, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.decode_worker.scale_out.generate_client import Client, client_of, reasons_of, tokens_of
from tests.toy import VOCAB, expected, make_engine
from tests.waiting import until
from tests.worker_pair import Router, of_toy, worker

PROMPT = [5, 17, 80, 2, 44, 9, 61, 33, 12, 7]
SAMPLED: dict[str, Any] = {
    "temperature": 1.5,
    "seed": 4711,
    "top_p": 0.99,
    "top_k": 90,
    "min_p": 0.0001,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "min_tokens": 4,
}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Of one decode node; afterwards its books balance."""
    async with worker("decode", make_engine(), enable_scale_out=True) as node, client_of(node) as client:
        yield client
        await node.settle()


async def routed_tokens(client: Client, prompt: list[int], **params: Any) -> list[int]:
    """What the node generates for a router."""
    router = Router(None, client.node, "router")  # type: ignore[arg-type]
    await router.connect()
    work = Generate(SamplingParams(**params))
    await router.generate(Job("routed", 0, tuple(prompt), len(prompt), work, "router"))
    await until(lambda: router.finished("routed"))
    await router.close()
    return router.tokens("routed")


async def test_an_answer_has_the_shape_of_vllm(client: Client) -> None:
    answer = await client.whole(PROMPT, request_id="r1")
    assert answer["choices"] == [
        {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": expected(PROMPT, 8), "logprobs": None}
    ]
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("generate-tokens-r1", "toy", "tokens")
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = await client.whole(PROMPT, return_token_ids=True)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert again["prompt_token_ids"] == PROMPT
    assert again["choices"] == answer["choices"]


async def test_sampled_tokens_equal_those_that_a_router_gets(client: Client) -> None:
    wanted = await routed_tokens(client, PROMPT, **SAMPLED, max_tokens=24)
    answer = await client.whole(PROMPT, params={**SAMPLED, "max_tokens": 24})
    assert answer["choices"][0]["token_ids"] == wanted
    assert wanted != expected(PROMPT, 24), "the sampling parameters have an effect"
    other = await client.whole(PROMPT, params={**SAMPLED, "max_tokens": 24, "seed": 4712})
    assert other["choices"][0]["token_ids"] != wanted


async def test_a_stream_equals_the_whole_answer(client: Client) -> None:
    params = {**SAMPLED, "max_tokens": 40, "logprobs": 2}
    whole = (await client.whole(PROMPT, params=params))["choices"][0]
    chunks = await client.streamed(PROMPT, params=params, request_id="s")
    assert tokens_of(chunks) == whole["token_ids"]
    assert reasons_of(chunks) == ["length"]
    scores = [score for chunk in chunks for choice in chunk["choices"] for score in choice["logprobs"]["content"]]
    assert scores == whole["logprobs"]["content"]
    assert {chunk["request_id"] for chunk in chunks} == {"generate-tokens-s"}
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_streams_last_chunk_has_the_usage(client: Client) -> None:
    await client.whole(PROMPT)
    *chunks, last = await client.streamed(PROMPT, stream_options={"include_usage": True}, return_token_ids=True)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT, *[None] * (len(chunks) - 1)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = [chunk["usage"]["completion_tokens"] for chunk in await client.streamed(PROMPT, stream_options=options)]
    assert counted == sorted(counted)
    assert counted[-1] == 8


async def test_log_probabilities_have_the_drawn_token_first(client: Client) -> None:
    answer = await client.whole(PROMPT, params={"logprobs": 3, "logit_bias": {"3": 100}, "max_tokens": 2})
    for score in answer["choices"][0]["logprobs"]["content"]:
        first, *others = score["top_logprobs"]
        assert (score["token_id"], first["token_id"], first["logprob"]) == (3, 3, score["logprob"])
        assert [other["rank"] for other in others] == [1, 2]
        assert others[0]["logprob"] > others[1]["logprob"] > score["logprob"]
    only = await client.whole(PROMPT, params={"logprobs": 0, "max_tokens": 1})
    assert len(only["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1


async def test_prompt_log_probabilities(client: Client) -> None:
    scored = (await client.whole(PROMPT, params={"prompt_logprobs": 1, "max_tokens": 1}))["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == len(PROMPT)
    for token, each in zip(PROMPT[1:], scored[1:], strict=True):
        assert str(token) in each
        assert 1 in [one["rank"] for one in each.values()]


async def test_a_stop_token_is_the_last_token_and_the_stop_reason(client: Client) -> None:
    tokens = expected(PROMPT, 8)
    choice = (await client.whole(PROMPT, params={"stop_token_ids": [tokens[3]]}))["choices"][0]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[3])


async def test_bans_and_choices_of_tokens_hold(client: Client) -> None:
    first = expected(PROMPT, 1)[0]
    banned = await client.whole(PROMPT, params={"bad_words": [[first]], "max_tokens": 1})
    assert banned["choices"][0]["token_ids"] != [first]
    allowed = await client.whole(PROMPT, params={"allowed_token_ids": [4, 5], "max_tokens": 6})
    assert set(allowed["choices"][0]["token_ids"]) <= {4, 5}


async def test_without_a_bound_the_output_fills_the_context(client: Client) -> None:
    for params in ({"max_tokens": None}, {"max_tokens": 100_000}):
        choice = (await client.whole(PROMPT, params=params))["choices"][0]
        assert len(choice["token_ids"]) == 256 - len(PROMPT)
        assert choice["finish_reason"] == "length"


async def test_without_a_seed_answers_differ(client: Client) -> None:
    params = {"temperature": 2.0, "max_tokens": 60}
    first, second = [(await client.whole(PROMPT, params=params))["choices"][0]["token_ids"] for _ in range(2)]
    assert first != second


async def test_a_salt_has_a_cache_of_its_own(client: Client) -> None:
    cached = []
    for salt in (None, "tenant", "tenant", "other"):
        answer = await client.whole([*PROMPT, VOCAB - 1], cache_salt=salt)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 8, 0]


async def test_an_end_of_sequence_token_ends_the_output_unless_ignored() -> None:
    end = expected(PROMPT, 3)[2]
    parts = replace(of_toy(make_engine()), eos_token_ids=(end,))
    async with worker("decode", parts, enable_scale_out=True) as node, client_of(node) as client:
        choice = (await client.whole(PROMPT))["choices"][0]
        assert choice["token_ids"] == expected(PROMPT, 3)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        choice = (await client.whole(PROMPT, params={"ignore_eos": True}))["choices"][0]
        assert choice["token_ids"] == expected(PROMPT, 8)
        await node.settle()
