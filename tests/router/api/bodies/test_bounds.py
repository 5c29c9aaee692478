"""What a request may bring is bounded: one step beyond each bound is a 4xx that names the field and the bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api_parts import MESSAGES, Api, FakeCluster, error_of, says

CHAT, TEXT, RESPONSES, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TURN = {"role": "user", "content": "a"}


def tools(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{number}"}, **more} for number in range(count)]


BEYOND: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"model": "m" * 257}, "model", "256"),
    (CHAT, {"messages": [TURN] * 8193}, "messages", "8192"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 8193}]}, "messages[0].content",
     "8192"),
    (CHAT, {"documents": [{}] * 8193}, "documents", "8192"),
    (CHAT, {"chat_template_kwargs": {f"x{number}": 1 for number in range(65)}}, "chat_template_kwargs", "64"),
    (CHAT, {"tools": tools(129)}, "tools", "128"),
    (CHAT, {"tools": [{"function": {"name": "f" * 65}}]}, "tools[0].function.name", "64"),
    (CHAT, {"stop": ["x"] * 65}, "stop", "64"),
    (CHAT, {"stop": "x" * 1025}, "stop", "1024"),
    (CHAT, {"logit_bias": {str(number): 1 for number in range(301)}}, "logit_bias", "300"),
    (CHAT, {"stop_token_ids": list(range(1025))}, "stop_token_ids", "1024"),
    (CHAT, {"allowed_token_ids": list(range(2**15 + 1))}, "allowed_token_ids", "32768"),
    (CHAT, {"bad_words": ["x"] * 129}, "bad_words", "128"),
    (CHAT, {"bad_words": ["x" * 257]}, "bad_words[0]", "256"),
    (CHAT, {"cache_salt": "x" * 257}, "cache_salt", "256"),
    (CHAT, {"n": 129}, "n", "128"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
    (CHAT, {"priority": 2**31}, "priority", "2147483647"),
    (CHAT, {"max_tokens": 4097}, "max_tokens", "4096"),
    (CHAT, {"guided_regex": "a" * (2**18 + 1)}, "guided_regex", "262144"),
    (CHAT, {"guided_grammar": "root ::= " + '"a" ' * 2**14}, "guided_grammar", "65536"),
    (CHAT, {"guided_choice": [str(number) for number in range(10_001)]}, "guided_choice", "10000"),
    (CHAT, {"guided_json": {}, "guided_whitespace_pattern": " " * 1025}, "guided_json", "1024"),
    (CHAT, {"guided_json": {"description": "d" * 2**18}}, "guided_json", "262144"),
    (CHAT, {"guided_json": "[" * 65 + "]" * 65}, "guided_json", "64"),
    (TEXT, {"prompt": [[1]] * 1025}, "prompt", "1024"),
    (TEXT, {"prompt": ["a"] * 2049}, "prompt", "2048"),
    (TEXT, {"prompt": [7] * 4097}, "prompt", "4096"),
    (RESPONSES, {"input": [TURN] * 8193}, "input", "8192"),
    (RESPONSES, {"tools": [{"type": "function", "name": f"f{number}"} for number in range(129)]}, "tools", "128"),
    (RESPONSES, {"metadata": {str(number): "x" for number in range(17)}}, "metadata", "16"),
    (RESPONSES, {"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
    (RESPONSES, {"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 65}.[key]", "64"),
    (RESPONSES, {"cache_salt": "x" * 257}, "cache_salt", "256"),
    (RESPONSES, {"previous_response_id": "x" * 257}, "previous_response_id", "256"),
    (RESPONSES, {"include": ["x"] * 65}, "include", "64"),
    (RESPONSES, {"user": "x" * 513}, "user", "512"),
    (MESSAGE, {"messages": [TURN] * 8193}, "messages", "8192"),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8193}]}, "messages", "8192"),
    (MESSAGE, {"tools": [{"name": f"f{number}", "input_schema": {}} for number in range(129)]}, "tools", "128"),
    (MESSAGE, {"stop_sequences": ["x"] * 65}, "stop_sequences", "64"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2048"),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", "2048"),
    ("/detokenize", {"tokens": [5] * (2**18 + 1)}, "tokens", "262144"),
    ("/tokenize", {"prompt": "a" * (2**20 + 1)}, "prompt", "1048576"),
    ("/tokenize", {"messages": [TURN] * 8193}, "messages", "8192"),
]  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2}, TEXT: {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2}, MESSAGE: {"messages": [TURN], "max_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "bound"), BEYOND, ids=lambda value: str(value)[:40])
async def test_beyond_a_bound(path: str, fields: dict[str, Any], param: str, bound: str) -> None:
    api = Api(FakeCluster(says("x")))
    response = await api.http.post(path, json={**BASE.get(path, {}), **fields})
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"] if path == MESSAGE else error_of(response)
    assert bound in error["message"], error
    assert error.get("param", param)[:60] == param[:60]
    assert param[:60] in error["message"] or error.get("code") == "context_length_exceeded", error
    assert not api.cluster.dispatches


@pytest.mark.parametrize(
    ("data", "bound"),
    [
        (b'{"prompt": "a", "x": [%b1]}' % (b"1," * 2**20), "1048576 values"),
        (b'{"prompt": "a", "x": [%b1]}' % (b"[]," * 2**15), "32768 lists and objects"),
        (b'{"prompt": "a", "x": [%b1]}' % (b'{"a":{"b":[]}},' * 11_000), "32768 lists and objects"),
        (b'{"prompt": "a", "x": %b}' % (b"[" * 300 + b"]" * 300), "recursion limit"),
        (b'{"prompt": "a", "seed": %b}' % (b"9" * 5000), "out of range"),
    ],
    ids=["values", "lists", "objects", "depth", "digits"],
)
async def test_what_a_body_is_made_of_is_bounded(data: bytes, bound: str) -> None:
    response = await Api(FakeCluster(says("x"))).http.post(TEXT, content=data)
    assert response.status_code == 400
    assert bound in error_of(response)["message"]


async def test_brackets_within_texts_are_no_objects() -> None:
    prompt = '[{"' * 20_000
    response = await Api(FakeCluster(says("x"))).complete(prompt=prompt, max_tokens=2, truncate_prompt_tokens=10)
    assert response.status_code == 200, response.text


async def test_several_texts_have_so_many_tokens_and_no_more() -> None:
    api = Api(FakeCluster(says("x")), max_prompt_tokens=5000)
    texts = ["river stone cloud market " * 200] * 7
    refused = await api.http.post("/v1/completions", json={"prompt": texts, "max_tokens": 2})
    assert refused.status_code == 400
    assert "5000 tokens" in error_of(refused)["message"]
    assert (await api.http.post("/v1/completions", json={"prompt": texts[:4], "max_tokens": 2})).status_code == 200


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
            ]
        },
        {"tools": tools(1), "guided_json": DEEP},
        {"guided_json": DEEP},
        {"response_format": {"type": "grammar", "grammar": DEEP}},
        {"guided_regex": "(" * 100_000},
    ],
    ids=["arguments", "schema with tools", "schema", "grammar", "regex"],
)
async def test_json_within_json_may_nest_as_deep_as_it_likes(fields: dict[str, Any]) -> None:
    response = await Api(FakeCluster(says("x"))).chat(**fields)
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize(
    "value", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"18446744073709551616"]
)
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "length_penalty",
     "max_tokens", "seed", "top_k", "n", "min_tokens", "priority", "truncate_prompt_tokens"],
)  # fmt: skip
async def test_numbers_that_are_none(field: str, value: bytes) -> None:
    data = json.dumps({"prompt": "a", "max_tokens": 2}).encode()[:-1] + b', "%b": %b}' % (field.encode(), value)
    response = await Api(FakeCluster(says("x"))).http.post(TEXT, content=data)
    if value == b"1e-400":
        assert response.status_code in (200, 400)
        return
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field
