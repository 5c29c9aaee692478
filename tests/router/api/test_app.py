from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvferry.protocol.errors import ConfigError, Overloaded
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.version import VERSION
from kvferry.router.dispatch.interface import Output, RequestSpec, Route
from kvferry.router.text.loader import load_text_model
from tests.api_parts import (
    EOS,
    MESSAGES,
    Api,
    FakeCluster,
    FakeDispatch,
    demo_text,
    error_of,
    ids_of,
    logprob_of,
    says,
    served,
)
from tests.fake_workers import lease_of
from tests.waiting import until, until_told

TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
LONG = says("word " * 2000)
NAME, NODES = "SmolLM2-135M-Instruct", {"prefill": 0, "decode": 1}


async def test_operations() -> None:
    api = Api(FakeCluster(says("x")))
    assert (await api.http.get("/health")).json() == {"status": "ok"}
    ready = await api.http.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "nodes": NODES, "models": {NAME: NODES}})
    api.cluster.is_ready = False
    assert (await api.http.get("/ready")).json()["status"] == "ready", "the router is, whatever its nodes are"
    assert (await api.http.get("/ready?nodes=0")).status_code == 200
    odd = await api.http.get("/ready?nodes=2")
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "nodes")
    lonely = await api.http.get("/ready?nodes=1")
    assert (lonely.status_code, lonely.json()["nodes"]["decode"]) == (503, 0)
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.http.get("/version")).json() == {"version": VERSION}
    await until_told(api.http, "kvferry_requests_inflight 0.0")


async def test_a_router_that_knows_of_no_node_is_not_ready() -> None:
    """Else a rollout while Redis is away ends those that remember their nodes."""
    api = Api(FakeCluster(says("x")))
    api.cluster.is_ready, api.cluster.lacks = False, "Redis: no answer"
    for path in ("/ready", "/ready?nodes=1"):
        answer = await api.http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "Redis: no answer")
        assert "retry-after" in answer.headers
    assert (await api.http.get("/health")).status_code == 200
    api.cluster.lacks = ""
    assert (await api.http.get("/ready")).status_code == 200


async def test_the_last_tokens_of_a_stream_go_out_with_its_end() -> None:
    """One write less for each stream."""
    writes: list[bytes] = []

    async def send(message: Any) -> None:
        writes.append(message.get("body", b""))

    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 3}).encode()
    told = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in told:
            return message
        await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    await Api(FakeCluster(says("a b c"))).app(scope, receive, send)
    assert writes[-1].endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in writes[-1]


async def test_models() -> None:
    api = Api(FakeCluster(says("x"), max_model_len=2048))
    (model,) = (await api.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("SmolLM2-135M-Instruct", "model", 2048)
    assert (await api.http.get("/v1/models/SmolLM2-135M-Instruct")).json() == model
    missing = await api.http.get("/v1/models/org/other")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize() -> None:
    api = Api(FakeCluster(says("x")))
    found = (await api.http.post("/tokenize", json={"prompt": "Hi 12", "return_token_strs": True})).json()
    assert found == {
        "count": 4, "max_model_len": 4096, "tokens": ids_of("Hi 12"), "token_strs": ["Hi", "Ġ", "1", "2"],
    }  # fmt: skip
    chat = (await api.http.post("/tokenize", json={"messages": MESSAGES})).json()
    await api.chat()
    assert tuple(chat["tokens"]) == api.cluster.dispatches[0].spec.token_ids
    text = (await api.http.post("/detokenize", json={"tokens": [*ids_of("Hi 12"), EOS]})).json()
    assert text == {"prompt": "Hi 12<|im_end|>", "content": "Hi 12<|im_end|>"}
    assert error_of(await api.http.post("/tokenize", json={}))["param"] == "prompt"
    assert error_of(await api.http.post("/detokenize", json={"tokens": [-1]}))["param"] == "tokens"
    assert error_of(await api.http.post("/detokenize", json={"tokens": [1], "model": "x"}))["param"] == "model"


async def test_the_api_key_guards_all_but_probes_and_metrics() -> None:
    api = Api(FakeCluster(says("x")), api_key="sécret")
    for path in ("/health", "/ready", "/metrics"):
        assert (await api.http.get(path)).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s"}, {"authorization": "Bearer"}):
        for path in ("/v1/models", "/nowhere", "/docs"):
            response = await api.http.get(path, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["x-request-id"]
    good = {b"authorization": "bearer sécret".encode()}
    assert (await api.http.get("/v1/models", headers=good)).status_code == 200


@pytest.mark.parametrize("given", ["abc-1:2.3_4", None, "", "x" * 129, "two words"])
async def test_request_ids(given: str | None) -> None:
    api = Api(FakeCluster(says("x")))
    headers = {} if given is None else {"x-request-id": given}
    for response in (
        await api.http.post("/v1/completions", json={"prompt": "a"}, headers=headers),
        await api.http.get("/nowhere", headers=headers),
    ):
        shown = response.headers["x-request-id"]
        assert (shown == given) is (given == "abc-1:2.3_4")
        assert shown


async def test_a_clients_id_is_the_id_in_body_header_logs_and_messages(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(FakeCluster(says("x")))
    headers = {"x-request-id": "order-7", "traceparent": TRACE}
    chat = await api.http.post("/v1/chat/completions", json={"messages": MESSAGES}, headers=headers)
    text = await api.http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}, headers=headers)
    assert (chat.headers["x-request-id"], chat.json()["id"]) == ("order-7", "chatcmpl-order-7")
    assert (text.headers["x-request-id"], text.json()["id"]) == ("order-7", "cmpl-order-7")
    specs = [dispatch.spec for dispatch in api.cluster.dispatches]
    assert {spec.call.id for spec in specs} == {"order-7"}
    assert {spec.call.trace for spec in specs} == {TRACE}
    assert all(spec.request_id.startswith("order-7") for spec in specs)
    api.cluster.script = None  # type: ignore[assignment]
    await api.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert "order-7: /v1/completions failed" in caplog.text


async def test_a_drawn_id_is_one_id_too() -> None:
    api = Api(FakeCluster(says("x")))
    response = await api.complete()
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    (dispatch,) = api.cluster.dispatches
    assert dispatch.spec.request_id == response.headers["x-request-id"]


async def test_the_deadline_counts_from_arrival() -> None:
    api = Api(FakeCluster(says("x")), request_timeout=30.0)
    before = time.monotonic()
    await api.complete()
    call = api.cluster.dispatches[0].spec.call
    assert before <= call.arrival <= time.monotonic()
    assert call.deadline == call.arrival + 30.0


async def test_more_requests_than_the_limit_are_told_to_come_back() -> None:
    api = Api(FakeCluster(LONG, gap_s=0.05), max_inflight=2)
    running = [asyncio.create_task(api.chat(max_tokens=8)) for _ in range(2)]
    await until(lambda: len(api.cluster.dispatches) == 2, 2.0)
    assert api.sample("kvferry_requests_inflight") == 2
    refused = await api.chat()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert error_of(refused)["type"] == "rate_limit_error"
    assert [(await task).status_code for task in running] == [200, 200]
    assert (await api.chat(max_tokens=1)).status_code == 200


async def test_a_bug_is_a_server_error_in_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    def broken(spec: object) -> list:
        raise RuntimeError("secret detail")

    api = Api(FakeCluster(broken))
    response = await api.chat()
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert "secret detail" in caplog.text


async def test_a_model_without_a_template_says_so() -> None:
    api = Api(FakeCluster(says("x")), replace(demo_text(), template=None))
    error = error_of(await api.chat())
    assert (error["param"], "chat template" in error["message"]) == ("messages", True)
    assert (await api.complete()).status_code == 200


def test_settings_name_the_model_and_replace_its_template(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    text = load_text_model(RouterSettings(served_model_name=("mine",), chat_template=str(file)))
    assert text.name == "mine"
    assert text.render(MESSAGES) == "Hello!"
    with pytest.raises(ConfigError, match="chat template"):
        load_text_model(RouterSettings(chat_template=str(tmp_path / "missing.jinja")))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_dispatches_at_once(stream: bool) -> None:
    api = Api(FakeCluster(LONG, gap_s=0.02))
    with served(api.app) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            body = {"messages": MESSAGES, "stream": stream, "n": 2}
            request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            await until(lambda: len(api.cluster.dispatches) == 2 and api.cluster.dispatches[1].yielded > 2, 2.0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        waited = await until(lambda: all(dispatch.cancelled.is_set() for dispatch in api.cluster.dispatches), 2.0)
        assert waited < 1.0
        await until(lambda: api.sample("kvferry_requests_inflight") == 0, 2.0)
    assert api.sample("kvferry_requests_total", endpoint="/v1/chat/completions", status="499") == 1


async def test_a_client_that_leaves_before_the_first_token_cancels_too() -> None:
    api = Api(FakeCluster(LONG, gap_s=30.0))
    with served(api.app) as url:
        with pytest.raises(httpx.ReadTimeout):
            await httpx.AsyncClient(base_url=url, timeout=1.0).post("/v1/chat/completions", json={"messages": MESSAGES})
        await until(lambda: api.cluster.dispatches[0].cancelled.is_set(), 1.0)


async def test_work_that_ignores_the_first_cancellation_is_cancelled_again() -> None:
    class Deaf(FakeDispatch):
        async def __aiter__(self) -> AsyncGenerator[Output]:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
            await asyncio.sleep(30)
            yield Output((1,))

    class DeafCluster(FakeCluster):
        def start(self, spec: RequestSpec) -> FakeDispatch:
            self.dispatches.append(Deaf(spec, (), Route("p0", "d0", Reuse(1, computed=1)), 0.0))
            return self.dispatches[-1]

    api = Api(DeafCluster(LONG))
    with served(api.app) as url:
        with pytest.raises(httpx.ReadTimeout):
            await httpx.AsyncClient(base_url=url, timeout=1.0).post("/v1/chat/completions", json={"messages": MESSAGES})
        await until(lambda: api.sample("kvferry_requests_inflight") == 0, 1.0)


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten() -> None:
    api = Api(FakeCluster(LONG))
    with served(api.app) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            await until(lambda: api.sample("kvferry_requests_inflight") == 1, 2.0)
        await until(lambda: api.sample("kvferry_requests_inflight") == 0, 2.0)
    assert api.cluster.dispatches == []


async def test_bodies_that_still_arrive_take_no_place_of_those_that_came() -> None:
    """A few hundred bodies that drip would stop the router otherwise: each may take minutes."""
    api = Api(FakeCluster(LONG), max_inflight=2)
    with served(api.app) as url, contextlib.ExitStack() as slow:
        for _ in range(2):
            raw = slow.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)))
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: api.sample("kvferry_requests_inflight") == 2, 2.0)
        assert (await api.chat(max_tokens=1)).status_code == 200


def test_the_openai_client() -> None:
    answer = "Ferries carry 12 cars 🚗 each."
    api = Api(FakeCluster(says(answer), cached=16), api_key="key")
    with served(api.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id).id == model.id
        whole = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1
        )
        assert whole.choices[0].message.content == answer
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 16
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        assert whole.choices[0].logprobs.content[0].logprob == logprob_of(ids_of(answer)[0])
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
            stop=[" each"],
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.removesuffix(" each.")
        assert chunks[-1].usage is not None
        echoed = client.completions.create(model=model.id, prompt="Say", echo=True, logprobs=1)
        assert echoed.choices[0].text == "Say" + answer
        raw = client.completions.with_raw_response.create(model=model.id, prompt="Say")
        assert raw.headers["x-kvferry-route"].startswith("prefill=p0 decode=d0 reused=")


def test_the_openai_client_sees_typed_errors() -> None:
    api = Api(FakeCluster(lambda spec: [Overloaded("full", retry_after=1)]), api_key="key")
    with served(api.app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        messages: Any = [{"role": "user", "content": "Hi"}]
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=messages)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=messages, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_an_error_in_mid_stream_reaches_the_openai_client() -> None:
    word = FakeCluster(says("Hello world"))
    api = Api(FakeCluster(lambda spec: [word.script(spec)[0], Overloaded("all nodes lost")]))
    with served(api.app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="all nodes lost"):
            list(stream)


async def test_targets_are_what_prometheus_discovers_over_http() -> None:
    api = Api(FakeCluster(says("x")))
    assert (await api.http.get("/targets")).json() == []
    api.cluster.nodes = [
        lease_of("p0", "prefill", http_url="http://[fd00::1]:41"), lease_of("d0", "decode", http_url="http://10.0.0.1:42")
    ]  # fmt: skip
    answer = await api.http.get("/targets")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == [
        {"targets": ["10.0.0.1:42"], "labels": {"component": "decode", "node": "d0"}},
        {"targets": ["[fd00::1]:41"], "labels": {"component": "prefill", "node": "p0"}},
    ]
    guarded = Api(FakeCluster(says("x")), api_key="k")
    assert (await guarded.http.get("/targets")).status_code == 401, "addresses are nobody's business"
