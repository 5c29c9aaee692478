"""The OpenAPI description: complete, without loose ends, and true of what the router takes and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import Overloaded
from tests.api_parts import MESSAGES, Api, FakeCluster, error_of, says
from tests.infill_parts import text_with

PLAIN = (
    "/v1/models", "/v1/models/SmolLM2-135M-Instruct", "/health", "/ready", "/version", "/targets", "/tokenizer_info",
    "/dashboard/state",
)  # fmt: skip
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infill")
ERRORS = {
    **dict.fromkeys(GENERATING, 429),
    **dict.fromkeys(("/v1/messages/count_tokens", "/tokenize", "/detokenize"), 400),
}
READING = (
    "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/classify", "/classify",
)  # fmt: skip
SHOWING = ("/apply-template", "/v1/chat/completions/render", "/v1/completions/render")
TAKING = (*GENERATING, "/v1/messages/count_tokens", "/tokenize", "/detokenize", *SHOWING)


async def described() -> dict[str, Any]:
    document: dict[str, Any] = (await Api(FakeCluster(says("x"))).http.get("/openapi.json")).json()
    return document


_DESCRIBED: dict[Api, dict[str, Any]] = {}


async def described_by(api: Api) -> dict[str, Any]:
    """The same, asked for once."""
    if api not in _DESCRIBED:
        _DESCRIBED[api] = (await api.http.get("/openapi.json")).json()
    return _DESCRIBED[api]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from references(item)


def resolved(document: dict[str, Any], reference: str) -> Any:
    assert reference.startswith("#/"), reference
    node: Any = document
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def response_of(document: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    found: dict[str, Any] = document["paths"][path][method]["responses"][str(status)]
    return found


def validate(document: dict[str, Any], described: dict[str, Any], answer: httpx.Response) -> None:
    schema = described["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


async def test_every_reference_resolves() -> None:
    document = await described()
    found = set(references(document))
    assert len(found) > 10
    for reference in found:
        assert resolved(document, reference)


async def test_what_is_taken_and_what_is_answered_have_names_of_their_own() -> None:
    schemas = (await described())["components"]["schemas"]
    assert {"role", "content", "tool_calls"} == set(schemas["Message"]["properties"])
    assert set(schemas["AnswerMessage"]["properties"]) == {
        "role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls", "function_call",
    }  # fmt: skip


async def test_every_route_is_described_and_every_error_has_its_schema() -> None:
    document = await described()
    assert set(document["paths"]) == {
        *TAKING, *READING, "/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items",
        "/v1/chat/completions/{id}", "/v1/completions/{id}",
        "/v1/models", "/v1/models/{id}", "/health", "/ready", "/metrics", "/version", "/", "/tokenizer_info",
        "/targets",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/dashboard",
        "/v1/sessions/{session_id}",
        "/dashboard/state", "/dashboard/view", "/v1/audio/transcriptions", "/v1/audio/translations",
    }  # fmt: skip
    for path in GENERATING:
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "404", "429", "503"} <= set(responses)
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        for status in ("429", "503"):
            assert responses[status]["headers"]["retry-after"]["schema"] == {"type": "integer", "minimum": 1}
    errors = {
        (path.startswith("/v1/messages"), response["content"]["application/json"]["schema"]["$ref"])
        for path, operations in document["paths"].items()
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if int(status) >= 400 and operation not in [document["paths"][path]["get"] for path in ("/ready", "/health")]
    }
    assert errors == {
        (False, "#/components/schemas/ErrorAnswer"),
        (True, "#/components/schemas/MessageErrorAnswer"),
    }
    assert set(response_of(document, "get", "/metrics", 200)["content"]) == {"text/plain"}


async def test_a_key_is_described_where_it_is_asked_for() -> None:
    api = Api(FakeCluster(says("x")), api_key="k")
    headers = {"authorization": "Bearer k"}
    document = (await api.http.get("/openapi.json", headers=headers)).json()
    chat, health = document["paths"]["/v1/chat/completions"]["post"], document["paths"]["/health"]["get"]
    assert chat["security"] == [{"key": []}]
    assert "401" in chat["responses"]
    told = response_of(document, "post", "/v1/messages", 401)["content"]["application/json"]["schema"]["$ref"]
    assert told == "#/components/schemas/MessageErrorAnswer"
    assert "security" not in health
    assert "swagger" in (await api.http.get("/docs", headers=headers)).text


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 1, "return_token_ids": True, "prompt_logprobs": 1}])
async def test_answers_are_as_described(fields: dict[str, Any]) -> None:
    api = Api(FakeCluster(says("one two"), cached=2), text_with("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    document = (await api.http.get("/openapi.json")).json()
    for path in PLAIN:
        described_path = path.replace("SmolLM2-135M-Instruct", "{id}")
        validate(document, response_of(document, "get", described_path, 200), await api.http.get(path))
    posts = {
        "/v1/chat/completions": {"messages": MESSAGES, **fields, "logprobs": bool(fields)},
        "/v1/completions": {"prompt": "a", **fields},
        "/v1/responses": {"input": "a", "top_logprobs": len(fields)},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 1 + len(fields)},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/tokenize": {"prompt": "a", "return_token_strs": True},
        "/detokenize": {"tokens": [1, 2]},
        SHOWING[0]: {"messages": MESSAGES},
        SHOWING[1]: {"messages": MESSAGES},
        SHOWING[2]: {"prompt": ["a", "b"]},
        "/infill": {"input_prefix": "a", "input_suffix": "b"},
    }
    for path, body in posts.items():
        answer = await api.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        validate(document, response_of(document, "post", path, 200), answer)
    kept = "/v1/responses/{id}"
    begun = (await api.http.post("/v1/responses", json={"input": "a", "background": True})).json()
    cancelled = await api.http.post(f"{kept}/cancel".format(**begun))
    validate(document, response_of(document, "post", f"{kept}/cancel", 200), cancelled)
    for method, path in (("get", kept), ("get", f"{kept}/input_items"), ("delete", kept)):
        answer = await api.http.request(method, path.format(**begun))
        validate(document, response_of(document, method, path, 200), answer)
    validate(document, response_of(document, "get", kept, 404), await api.http.get(kept.format(**begun)))
    api.cluster.is_ready = False
    validate(document, response_of(document, "get", "/ready", 503), await api.http.get("/ready?nodes=1"))
    api.cluster.refusal = Overloaded("full")
    for path, status in ERRORS.items():
        answer = await api.http.post(path, json=posts[path] if status == 429 else {})
        assert answer.status_code == status
        validate(document, response_of(document, "post", path, status), answer)


def bodies(document: dict[str, Any], schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema, a few of its optional properties at a time."""
    if "$ref" in schema:
        return st.deferred(lambda: bodies(document, resolved(document, schema["$ref"])))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of(*(bodies(document, choice) for choice in schema["anyOf"]))
    match schema.get("type"):
        case "object" if "properties" in schema:
            required = {name: bodies(document, schema["properties"][name]) for name in schema.get("required", ())}
            others = {name: kind for name, kind in schema["properties"].items() if name not in required}
            some = st.lists(st.sampled_from(sorted(others)), max_size=4, unique=True) if others else st.just([])
            return st.fixed_dictionaries(required).flatmap(
                lambda base: some.flatmap(
                    lambda names: st.fixed_dictionaries({name: bodies(document, others[name]) for name in names}).map(
                        lambda extra: {**base, **extra}
                    )
                )
            )
        case "object":
            values = schema.get("additionalProperties")
            inner = bodies(document, values) if isinstance(values, dict) else ANYTHING
            return st.dictionaries(st.text(max_size=5), inner, max_size=2)
        case "array":
            low = schema.get("minItems", 0)
            return st.lists(bodies(document, schema.get("items", {})), min_size=low, max_size=low + 2)
        case "string":
            low = schema.get("minLength", 0)
            return st.sampled_from(["system", "user", "assistant"]) | st.text(min_size=low, max_size=low + 8)
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return ANYTHING


@pytest.fixture
def speaking() -> Api:
    return Api(FakeCluster(says("x")))


ANYTHING = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.just({}) | st.just([])


@pytest.mark.parametrize("path", TAKING)
@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_described_bodies_are_answered_or_refused_by_name(speaking: Api, path: str, data: st.DataObject) -> None:
    api = speaking
    document = await described_by(api)
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    response = await api.http.post(path, json=data.draw(bodies(document, body)))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200 and not path.startswith("/v1/messages"):
        error_of(response)
