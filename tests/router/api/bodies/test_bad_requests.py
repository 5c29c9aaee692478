"""Whatever a client sends, it gets an OpenAI error object that names the field, and no work is started."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api_parts import MESSAGES, Api, FakeCluster, error_of, says

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "no role"}]}, "messages[0].role"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": 5}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "admin", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": ["text"]}]}, "messages[0].content[0]"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 10, "min_tokens": 11}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "maybe"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}}, "response_format.json_schema.strict"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a+"}, "guided_regex"),
    ({"guided_regex": "a+", "guided_json": {}}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    ({"functions": [{"name": "f g"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    (
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"bad_words": "x"}, "bad_words"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
]  # fmt: skip
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2, "n": 3}, "best_of"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=str)
async def test_chat(fields: dict[str, Any], param: str) -> None:
    api = Api(FakeCluster(says("x")))
    response = await api.chat(**fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert not api.cluster.dispatches
    assert api.sample("kvferry_requests_total", endpoint="/v1/chat/completions", status="400") == 1


@pytest.mark.parametrize(("fields", "param"), COMPLETION, ids=str)
async def test_completions(fields: dict[str, Any], param: str) -> None:
    api = Api(FakeCluster(says("x")))
    response = await api.complete(**fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert not api.cluster.dispatches


async def test_an_unknown_role_names_the_known_ones() -> None:
    api = Api(FakeCluster(says("x")))
    error = error_of(await api.chat(messages=[{"role": "admin", "content": "x"}]))
    assert "system, developer, user, assistant, tool, function" in error["message"]
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert (await api.chat(messages=[{"role": role, "content": "x", "name": "n"}])).is_success
    error = error_of(await api.http.post("/tokenize", json={"messages": [{"role": "admin", "content": "x"}]}))
    assert error["param"] == "messages[0].role"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 10**5]
)
async def test_bodies_that_are_no_json_object(path: str, data: bytes) -> None:
    api = Api(FakeCluster(says("x")))
    response = await api.http.post(path, content=data)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_the_content_type_does_not_matter() -> None:
    api = Api(FakeCluster(says("x")))
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await api.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


async def test_unknown_models_routes_and_methods() -> None:
    api = Api(FakeCluster(says("x")))
    wrong_model = await api.chat(model="gpt-5")
    assert (wrong_model.status_code, error_of(wrong_model)["code"]) == (404, "model_not_found")
    unknown = await api.http.get("/v1/nothing")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "not_found")
    wrong_method = await api.http.get("/v1/chat/completions")
    assert (wrong_method.status_code, error_of(wrong_method)["code"]) == (405, "method_not_allowed")
    assert wrong_method.headers["allow"] == "POST"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OTHER = ["model", "prompt", "messages", "logprobs", "top_logprobs", "functions", "documents", "stream_options"]
NAMES = sorted({name for fields, _ in CHAT + COMPLETION for name in fields} | {*OTHER})


@pytest.fixture
def api() -> Api:
    return Api(FakeCluster(says("x")))


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_body_makes_the_router_fail(api: Api, fields: dict[str, Any], chat: bool) -> None:
    """One router answers all of them."""
    base: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": "a"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = await api.http.post(path, json={**base, **fields})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response)
