"""The API of token ids refuses by name what it cannot do, in the API's error shape, before anything runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.decode_worker.scale_out.bodies import read_generate
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import InvalidRequest
from tests.decode_worker.scale_out.generate_client import GENERATE, Client, client_of
from tests.toy import VOCAB, make_engine
from tests.worker_pair import worker

PROMPT = [1, 2, 3]
UNSUPPORTED_FIELDS: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True},
    "ec_transfer_params": {"a": 1},
    "features": {"mm_hashes": {}},
    "content_parts": [{}],
    "output_mode": "text",
    "reasoning_ended": False,
    "reasoning_parser_kwargs": {"chat_template_kwargs": {"a": 1}},
    "no_such_field": 1,
}
UNSUPPORTED_PARAMS: dict[str, Any] = {
    "n": 2,
    "stop": ["end"],
    "skip_reading_prefix_cache": True,
    "truncate_prompt_tokens": 4,
    "thinking_token_budget": 10,
    "logits_processors": ["x"],
    "extra_args": {"x": 1},
    "no_such_parameter": 1,
}
WRONG_PARAMS: dict[str, Any] = {
    "max_tokens": 0,
    "min_tokens": 9,
    "temperature": 3,
    "top_p": 0,
    "top_k": -2,
    "min_p": 2,
    "presence_penalty": 3,
    "frequency_penalty": -3,
    "repetition_penalty": 0,
    "seed": 2**63,
    "stop_token_ids": [VOCAB],
    "logprobs": 21,
    "prompt_logprobs": -1,
    "logit_bias": {"x": 1.0},
    "allowed_token_ids": [],
    "ignore_eos": "yes",
}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Of one decode node; nothing ever runs on it."""
    async with worker("decode", make_engine(), enable_scale_out=True) as node, client_of(node) as client:
        yield client
        assert node.node.metrics.step_tokens["prefill"]._value.get() == 0
        await node.settle()


async def refused(client: Client, param: str, token_ids: Any = PROMPT, status: int = 400, **fields: Any) -> str:
    """The message of the refusal, which names the parameter."""
    answer = await client.post(token_ids, **fields)
    assert answer.status_code == status, (param, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    return str(error["message"])


async def test_fields_without_support_are_named(client: Client) -> None:
    for name, value in UNSUPPORTED_FIELDS.items():
        assert f"{name}" in await refused(client, name, **{name: value})
    for name, value in UNSUPPORTED_PARAMS.items():
        assert "not supported" in await refused(client, f"sampling_params.{name}", params={name: value})


async def test_values_out_of_their_bounds_are_named(client: Client) -> None:
    for name, value in WRONG_PARAMS.items():
        assert name in await refused(client, f"sampling_params.{name}", params={name: value})
    assert "bad_words" in await refused(client, "sampling_params.bad_words[0]", params={"bad_words": ["word"]})
    structured = "sampling_params.structured_outputs"
    await refused(client, structured, params={"structured_outputs": {"json": "{}", "regex": "a"}})
    await refused(client, f"{structured}.grammer", params={"structured_outputs": {"grammer": "a"}})


async def test_numbers_of_any_length_and_none_are_refused(client: Client) -> None:
    huge = 10**400
    for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "temperature", "top_p"):
        await refused(client, f"sampling_params.{name}", params={name: huge})
    for name in ("stop_token_ids", "allowed_token_ids"):
        await refused(client, f"sampling_params.{name}[0]", params={name: [huge]})
    await refused(client, "token_ids[0]", [huge])
    for text in ("NaN", "Infinity", "-Infinity", "1e400"):
        for field in (f'"temperature": {text}', f'"logit_bias": {{"1": {text}}}', f'"min_p": {text}'):
            content = f'{{"token_ids": [1], "sampling_params": {{{field}}}}}'
            answer = await client.http.post(GENERATE, content=content)
            assert answer.status_code == 400, content
            assert "sampling_params" in answer.json()["error"]["param"]


async def test_prompts_that_do_not_fit_are_refused(client: Client) -> None:
    for token_ids in ([], [VOCAB], [-1], list(range(100)) * 3, "text"):
        await refused(client, "token_ids", token_ids)
    await refused(client, "token_ids[1]", [1, "2"])


async def test_other_fields_are_checked(client: Client) -> None:
    assert "serves 'toy'" in await refused(client, "model", status=404, model="other")
    await refused(client, "stream_options", stream_options={"include_usage": True})
    await refused(client, "sampling_params.prompt_logprobs", stream=True, params={"prompt_logprobs": 1})
    await refused(client, "request_id", request_id="")
    await refused(client, "cache_salt", cache_salt="")
    await refused(client, "priority", priority="high")


async def test_bodies_that_are_no_requests_are_refused(client: Client) -> None:
    for content, word in ((b"{", "JSON"), (b"[]", "object"), (b"{}", "token_ids")):
        answer = await client.http.post(GENERATE, content=content)
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
    long = await client.http.post(GENERATE, content=b" " * (3 * 2**20))
    assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")
    with pytest.raises(InvalidRequest, match="more than 2097152 values"):
        read_generate(b"[" + b"[]," * 2**20)


async def test_what_other_servers_send_at_their_defaults_is_accepted() -> None:
    neutral = {"n": 1, "stop": [], "detokenize": True, "skip_special_tokens": True, "extra_args": None}
    fields = {
        "priority": 3,
        "features": None,
        "kv_transfer_params": None,
        "output_mode": "tokens",
        "token_offsets": None,
    }
    async with worker("decode", make_engine(), enable_scale_out=True) as node, client_of(node) as client:
        assert (await client.whole(PROMPT, params=neutral, **fields))["choices"][0]["finish_reason"] == "length"
        await node.settle()


async def test_an_adapter_is_chosen_by_its_name() -> None:
    async with worker("decode", make_engine(), enable_scale_out=True, served_model_name=("a", "b")) as node:
        node.loaded._adapters.held = (AdapterName("style", "f" * 32),)
        async with client_of(node) as client:
            assert (await client.whole(PROMPT, model="b"))["model"] == "b"
            answer = await client.post(PROMPT, model="style")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_loaded")
            cards = {each["id"]: each["parent"] for each in (await client.http.get("/v1/models")).json()["data"]}
            assert cards == {"a": None, "b": None, "toy": None, "style": "a"}
            assert "'style'" in await refused(client, "model", status=404, model="other")
        await node.settle()
