"""What clients and proxies do that no API's words name: each gets the answer it means, or one that tells."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic.json_schema import models_json_schema

from kvferry.router.api import documentation
from tests.api_parts import MESSAGES, Api, FakeCluster, error_of, says, served

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
}


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> Api:
    return Api(FakeCluster(says("Yes.")), data_dir=str(tmp_path), allow_lora_updates=True)


def spelled(path: str) -> bytes:
    return json.dumps(BODIES[path]).encode()


@pytest.mark.parametrize("path", BODIES)
async def test_a_compressed_body_is_refused_by_that_name(api: Api, path: str) -> None:
    """It had been called JSON that is not valid."""
    for encoding in ("gzip", "br", "GZIP, identity"):
        headers = {"content-encoding": encoding}
        answer = await api.http.post(path, content=gzip.compress(spelled(path)), headers=headers)
        assert answer.status_code == 415, answer.text
        assert "content-encoding" in answer.json()["error"]["message"]
    plain = await api.http.post(path, content=spelled(path), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_byte_order_mark_and_a_slash_behind_the_path_are_overlooked(api: Api, path: str) -> None:
    """.NET and PowerShell write the one, people the other; a redirect would lose the body, or the proxy's scheme."""
    answer = await api.http.post(path + "/", content=b"\xef\xbb\xbf" + spelled(path))
    assert answer.status_code == 200, answer.text


async def test_a_slash_behind_the_path_names_nothing_else(api: Api) -> None:
    models = (await api.http.get("/v1/models")).json()
    assert (await api.http.get("/v1/models/")).json() == models
    name = models["data"][0]["id"]
    assert (await api.http.get(f"/v1/models/{name}/")).json() == models["data"][0]
    assert (await api.http.get("/health/")).status_code == 200
    assert (await api.http.get("/")).text.startswith("<!doctype html>")
    assert error_of(await api.http.get("/nowhere/"))["code"] == "not_found"


async def test_a_slash_behind_the_path_is_overlooked_below_a_root(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("Yes.")), root_path="/llm")
    for path in ("/llm/v1/models/", "/v1/models/", "/llm/v1/models"):
        assert (await api.http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/v1/files", "/metrics", "/openapi.json"])
def test_head_tells_what_get_would(path: str, tmp_path: Path) -> None:
    api = Api(FakeCluster(says("Yes.")), data_dir=str(tmp_path))
    with served(api.app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        got, told = client.get(path), client.head(path)
        assert (told.status_code, told.content) == (200, b"")
        assert told.headers["content-type"] == got.headers["content-type"]
        assert client.head("/v1/completions").status_code == 405
        assert client.get("/health").status_code == 200, "the connection goes on"


FORM = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n\r\n--x--\r\n'
)


async def test_a_form_is_a_form_in_any_case(api: Api) -> None:
    headers = {"content-type": "Multipart/Form-Data; boundary=x"}
    assert (await api.http.post("/v1/files", content=FORM, headers=headers)).status_code == 200
    compressed = await api.http.post("/v1/files", content=FORM, headers={**headers, "content-encoding": "gzip"})
    assert (compressed.status_code, error_of(compressed)["code"]) == (415, "unsupported_media_type")


async def test_a_client_that_leaves_amid_a_file_is_no_error_of_ours(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """It had been logged with its whole traceback, as an error of the router."""

    def receiving(messages: Iterable[dict[str, Any]]) -> Any:
        coming: Iterator[dict[str, Any]] = iter(messages)

        async def receive() -> dict[str, Any]:
            return next(coming, {"type": "http.disconnect"})

        return receive

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"multipart/form-data; boundary=x")],
    }  # fmt: skip
    await api.app(scope, receiving([{"type": "http.request", "body": FORM[:99], "more_body": True}]), send)
    assert sent[0]["status"] == 499
    assert not caplog.records


@pytest.mark.parametrize(
    ("field", "value", "bound"), [("lora_name", "x" * 257, "256"), ("lora_path", "/" * 4097, "4096")]
)
async def test_names_and_paths_of_adapters_are_bounded(api: Api, field: str, value: str, bound: str) -> None:
    answer = await api.http.post("/v1/load_lora_adapter", json={**BODIES["/v1/load_lora_adapter"], field: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field
    assert bound in error_of(answer)["message"]


async def test_the_description_is_made_beside_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone who asked for it first had stopped all streams for a second."""
    made, build = [], models_json_schema

    def recorded(*args: Any, **named: Any) -> Any:
        made.append(threading.current_thread())
        return build(*args, **named)

    monkeypatch.setattr(documentation, "models_json_schema", recorded)
    first, second = await asyncio.gather(api.http.get("/openapi.json"), api.http.get("/openapi.json"))
    assert first.json() == second.json()
    assert "CompletionBody" in first.json()["components"]["schemas"]
    assert len(made) == 1
    assert made[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["", "b"]}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ],
)
async def test_of_two_texts_the_one_at_fault_is_named(api: Api, path: str, body: dict[str, Any], param: str) -> None:
    answer = await api.http.post(path, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_tool_that_makes_no_grammar_is_named_and_not_the_choice_of_it(api: Api, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    answer = await api.chat(tools=[tool], tool_choice=choice)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "tools")
    old = await api.chat(functions=[tool["function"]], function_call={"name": "f"})
    assert (old.status_code, error_of(old)["param"]) == (400, "functions")
