"""Routers as processes over one cluster: one is killed, frozen or drained, and its requests go on at another."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from benchmarks.servers import free_port
from tests.browser import CHROMIUM, browser
from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.forked_process import ForkedProcess
from tests.forked_python import ROUTERS, forked_python
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.resumed_streams import Gateway, Heard, background, ended, free_pair, listen, output, resumed
from tests.router.page.chat_tab import ENDED, ask, opened, set_fields
from tests.waiting import wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me a long story about a river."}]
START_S, TAKEOVER_S = 60.0, 2.0
STEP_S = 0.005
"""Seconds that a step of a node lasts at least: a tiny model would end its streams before anything befalls them."""
LONG, LONGER = 160, 600
"""Tokens: a second and several seconds of paced steps."""
EXACT = ("--batch-invariant", "--dtype", "bfloat16", "--threads", "1", "--kv-blocks", "1000")
"""Options of nodes: other sums would decide near ties otherwise."""
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": LONG, "temperature": 1.0, "seed": 5, "ignore_eos": True, "n": 2}),
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": LONG, "temperature": 1.0, "seed": 7, "logprobs": 1,
                   "ignore_eos": True}),
]  # fmt: skip


@dataclass
class OtherRouter:
    """A router process beside that of the cluster."""

    process: ForkedProcess
    url: str


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("s" * 40)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options that name a tiny model, whose streams break and go on as those of any other."""
    shape: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 2048}
    path = save_checkpoint(tmp_path_factory.mktemp("model"), "LlamaConfig", **shape)
    return "--model", str(path), "--served-model-name", MODEL


@pytest.fixture(scope="module")
def cluster(secret: Path, model: tuple[str, ...]) -> Iterator[LocalCluster]:
    with local_cluster("--cluster-secret-file", str(secret), *model, *EXACT, step_s=STEP_S) as running:
        yield running


@pytest.fixture
def other(cluster: LocalCluster, secret: Path, model: tuple[str, ...], tmp_path: Path) -> Iterator[OtherRouter]:
    """A second router, which a test may kill."""
    port = free_port()
    words = ["-m", "kvferry.cli.main", "router", "--redis-url", cluster.redis_url, "--cluster-secret-file", str(secret)]
    words += model
    words += ["--port", str(port), "--data-dir", str(tmp_path / "data")]
    with (tmp_path / "log").open("wb") as log:
        process = forked_python(ROUTERS).start(words, log.fileno(), log.fileno())
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready?nodes=1", timeout=2).json()["nodes"]["decode"] >= 1
            return False

        try:
            wait_for(ready, START_S)
            yield OtherRouter(process, url)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("which", range(len(BODIES)))
def test_a_stream_whose_router_is_killed(cluster: LocalCluster, other: OtherRouter, which: int) -> None:
    path, body = BODIES[which]
    undisturbed, heard = Heard(), Heard()
    listen(undisturbed, cluster.url, path, body)
    listen(heard, other.url, path, body, events=40, then=other.process.kill)
    assert not heard.is_whole
    resumed(heard, cluster.url, path, body)
    assert heard.texts() == undisturbed.texts()
    cluster.settle()


def test_a_stream_whose_router_freezes(cluster: LocalCluster, other: OtherRouter) -> None:
    path, body = BODIES[0]
    undisturbed, heard = Heard(), Heard()
    listen(undisturbed, cluster.url, path, body)
    listen(heard, other.url, path, body, events=20)
    unheard, key = Heard(), uuid4().hex
    running = threading.Thread(target=listen, args=(unheard, other.url, path, body), kwargs={"idempotency_key": key})
    running.start()
    wait_for(lambda: len(unheard.events) >= 40)
    other.process.send_signal(signal.SIGSTOP)
    again = Heard()
    began = time.monotonic()
    listen(again, cluster.url, path, body, idempotency_key=key)
    assert again.is_whole
    assert again.texts() == undisturbed.texts()
    assert time.monotonic() - began < 30
    resumed(heard, cluster.url, path, body)
    assert heard.texts() == undisturbed.texts(), "its client had left, and it was given up"
    other.process.send_signal(signal.SIGCONT)
    running.join(20)
    assert not running.is_alive()
    wait_for(lambda: value(scrape(other.url), "kvferry_requests_inflight") == 0, 10)
    cluster.settle()


def test_openai_s_own_retries_get_one_answer(cluster: LocalCluster, other: OtherRouter) -> None:
    path, body = BODIES[1][0], {**BODIES[1][1], "max_tokens": LONGER}
    expected = httpx.post(cluster.url + path, json=body, timeout=60).json()
    gateway = Gateway(other.url, cluster.url)
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", timeout=60, max_retries=5)
    threading.Timer(0.8, other.process.kill).start()
    before = value(scrape(cluster.url), "kvferry_takeovers_total", kind="stream")
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=LONGER, temperature=1.0, seed=5, n=2,  # type: ignore[arg-type]
        extra_body={"ignore_eos": True}, extra_headers={"Idempotency-Key": uuid4().hex},
    )  # fmt: skip
    gateway.close()
    assert [choice.message.content for choice in answer.choices] == [
        choice["message"]["content"] for choice in expected["choices"]
    ]
    assert value(scrape(cluster.url), "kvferry_takeovers_total", kind="stream") == before + 1
    cluster.settle()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_background_response_goes_on_at_another_router(
    cluster: LocalCluster, other: OtherRouter, how: signal.Signals
) -> None:
    seed = 1000 + how
    whole = background(cluster.url, LONGER, seed)
    expected = ended(cluster.url, whole)
    name = background(other.url, LONGER, seed)
    time.sleep(0.8)
    before = value(scrape(cluster.url), "kvferry_takeovers_total", kind="response")
    os.kill(other.process.pid, how)
    at = time.monotonic()
    wait_for(lambda: value(scrape(cluster.url), "kvferry_takeovers_total", kind="response") == before + 1, 10)
    assert time.monotonic() - at < TAKEOVER_S + 1.0
    response = ended(cluster.url, name)
    assert response["status"] == expected["status"]
    assert output(response) == output(expected)
    other.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert ended(cluster.url, name) == response, "a router that was frozen changes nothing"
    cluster.settle()


def test_redis_dies_and_streams_go_on(cluster: LocalCluster, other: OtherRouter) -> None:
    path, body = BODIES[0]
    undisturbed, heard = Heard(), Heard()
    listen(undisturbed, cluster.url, path, body)
    (valkey,) = cluster.children("valkey-server")
    listen(heard, other.url, path, body, events=40, then=valkey.kill)
    assert heard.is_whole
    assert heard.texts() == undisturbed.texts()
    lost = httpx.post(cluster.url + path, json={**body, "stream": True}, headers={"last-event-id": heard.last_id})
    assert lost.status_code in (404, 503)
    assert "resumed" in lost.json()["error"]["message"]


def test_serve_with_two_routers(model: tuple[str, ...]) -> None:
    """Each has a port of its own; a stream of the second goes on at the first."""
    path, body = BODIES[0]
    port = free_pair()
    with local_cluster("--routers", "2", "--port", str(port), *model, *EXACT, step_s=STEP_S) as running:
        second = f"http://127.0.0.1:{port + 1}"
        wait_for(lambda: httpx.get(f"{second}/ready?nodes=1", timeout=2).status_code == 200, START_S)
        (process,) = (each for each in running.children("router") if str(port + 1) in each.cmdline())
        undisturbed, heard = Heard(), Heard()
        listen(undisturbed, running.url, path, body)
        listen(heard, second, path, body, events=40, then=process.kill)
        assert not heard.is_whole
        resumed(heard, running.url, path, body)
        assert heard.texts() == undisturbed.texts()
        wait_for(lambda: len(running.children("router")) == 2, 20)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
def test_the_chat_page_goes_on_at_another_router(cluster: LocalCluster, other: OtherRouter, tmp_path: Path) -> None:
    gateway = Gateway(other.url, cluster.url)
    question = "Tell me a long story about a river."
    try:
        with browser(tmp_path / "profile") as page:
            opened(page, gateway.url)
            set_fields(page, temperature="0", max_tokens=str(LONG), more='{"ignore_eos": true}')
            ask(page, question)
            page.wait("chat.current.turns[1]?.text.length > 40")
            other.process.kill()
            page.wait(ENDED, 60)
            turn = page.evaluate("chat.current.turns[1]")
    finally:
        gateway.close()
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": LONG,
        "ignore_eos": True,
    }
    whole = httpx.post(cluster.url + CHAT, json=body, timeout=60).json()
    assert "error" not in turn
    assert turn["usage"]["completion_tokens"] == LONG
    assert turn["text"] == whole["choices"][0]["message"]["content"]
