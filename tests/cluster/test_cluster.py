"""A whole cluster as users meet it: real processes, Valkey, UCX and model, driven by the official `openai` client."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def ids(count: int, seed: int) -> list[int]:
    """Token ids that no other test uses as a prefix."""
    return random.Random(seed).choices(range(1000, 40000), k=count)


def test_chat_streams_what_it_answers_at_once(cluster: LocalCluster) -> None:
    client = cluster.client
    messages: Any = [{"role": "user", "content": "Name the capital of France in one short sentence."}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    pieces, usage, reasons = [], None, []
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([p for p in pieces if p]) > 3
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_route_header_names_both_nodes_and_the_reuse(cluster: LocalCluster) -> None:
    body = {"model": MODEL, "prompt": ids(300, 1), "max_tokens": 4}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200
    route = response.headers["x-kvferry-route"]
    assert re.fullmatch(r"prefill=(prefill-0|none) decode=decode-0 reused=0 computed=300", route)
    assert response.headers["x-request-id"]


def test_a_shared_prefix_is_not_computed_again(cluster: LocalCluster) -> None:
    prefix = ids(1024, 2)

    def computed() -> float:
        urls = [*cluster.worker_urls("prefill"), *cluster.worker_urls("decode")]
        return sum(value(scrape(url), "kvferry_step_tokens_total", phase="prefill") for url in urls)

    def ask(tail: list[int]) -> openai.types.Completion:
        return cluster.client.completions.create(model=MODEL, prompt=prefix + tail, max_tokens=2, temperature=0)

    cold = ask(ids(20, 3))
    cluster.settle()
    before, router_before = computed(), scrape(cluster.url)
    warm = ask(ids(20, 4))
    cluster.settle()
    assert 0 < computed() - before < 80
    router = scrape(cluster.url)
    name = "kvferry_prompt_tokens_total"
    assert value(router, name, source="computed") - value(router_before, name, source="computed") < 80
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert warm.usage.prompt_tokens_details.cached_tokens >= 1024
    assert cold.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens < 32


def test_32_requests_at_once(cluster: LocalCluster) -> None:
    def ask(i: int) -> tuple[int, str | None]:
        made = cluster.client.completions.create(
            model=MODEL, prompt=ids(20 + 5 * i, 100 + i), max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
        )
        assert made.usage is not None
        return made.usage.completion_tokens, made.choices[0].finish_reason

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == [(16, "length")] * 32


def test_a_seed_gives_the_same_text_and_n_gives_different_ones(cluster: LocalCluster) -> None:
    def ask() -> list[str]:
        made = cluster.client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=1.0, seed=7, n=3
        )
        return [choice.text for choice in made.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) == 3


def test_echo_and_logprobs_as_evaluation_harnesses_ask(cluster: LocalCluster) -> None:
    prompt = ids(40, 5)
    made = cluster.client.completions.create(
        model=MODEL, prompt=[prompt], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 41
    assert logprobs.token_logprobs[0] is None
    assert all(entry is not None and entry <= 0 for entry in logprobs.token_logprobs[1:])


def test_bad_input_is_refused_in_the_api_s_own_shape_and_loses_nothing(cluster: LocalCluster) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    cases = [
        ({**chat, "temperature": 9}, 400, "temperature"),
        ({**chat, "top_p": "x"}, 400, "top_p"),
        ({**chat, "messages": []}, 400, "messages"),
        ({**chat, "model": "nope"}, 404, "model"),
        ({**chat, "max_tokens": -1}, 400, "max_tokens"),
    ]
    for body, status, param in cases:
        response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert set(error) == {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError) as caught:
        cluster.client.completions.create(model=MODEL, prompt=ids(9000, 6), max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length" in str(caught.value)
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405)):
        response = httpx.request(method, f"{cluster.url}{path}")
        assert (response.status_code, set(response.json())) == (status, {"error"})
    response = httpx.post(f"{cluster.url}/v1/completions", content=b"{broken")
    assert (response.status_code, set(response.json())) == (400, {"error"})


def test_models_health_and_version(cluster: LocalCluster) -> None:
    assert [model.id for model in cluster.client.models.list()] == [MODEL]
    assert cluster.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        cluster.client.models.retrieve("nope")
    for path in ("/health", "/ready", "/version"):
        assert httpx.get(f"{cluster.url}{path}").status_code == 200


@pytest.mark.parametrize("prompt_len", [20, 2000])
def test_a_disconnected_client_frees_everything_within_a_second(cluster: LocalCluster, prompt_len: int) -> None:
    body = {"model": MODEL, "prompt": ids(prompt_len, 7 + prompt_len), "max_tokens": 2000, "stream": True}
    body["ignore_eos"] = True
    with httpx.Client(timeout=30) as client:
        request = client.build_request("POST", f"{cluster.url}/v1/completions", json=body)
        if prompt_len < 100:
            response = client.send(request, stream=True)
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.send(client.build_request("POST", request.url, json=body, timeout=0.4), stream=True)
    began = time.monotonic()
    cluster.settle(2.0)
    assert time.monotonic() - began < 1.5


def test_health_of_the_token_path_in_metrics(cluster: LocalCluster) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda i: cluster.client.completions.create(model=MODEL, prompt=ids(600, i), max_tokens=4),
                range(80, 84),
            )
        )
    cluster.settle()
    prefill, decode = (scrape(cluster.worker_urls(role)[0]) for role in ("prefill", "decode"))
    assert value(prefill, "kvferry_ships_total", outcome="done") >= 1
    assert value(prefill, "kvferry_ship_bytes_total") > 600 * 20_000
    assert value(decode, "kvferry_grants_total", outcome="granted") >= 1
    assert value(decode, "kvferry_grants_open") == 0
    router = scrape(cluster.url)
    assert value(router, "kvferry_time_to_first_token_seconds_count") >= 1
    assert value(router, "kvferry_nodes", role="decode", state="ready") == 1


def test_kill_9_of_the_prefill_process_mid_prompt() -> None:
    with local_cluster("--prefill", "1", "--decode", "1") as cluster:
        (prefill,) = cluster.children("prefill")
        with ThreadPoolExecutor(4) as pool:

            def ask(i: int) -> tuple[int, str | None]:
                made = cluster.client.completions.create(
                    model=MODEL, prompt=ids(2500, 20 + i), max_tokens=12, extra_body={"ignore_eos": True}
                )
                assert made.usage is not None
                return made.usage.completion_tokens, made.choices[0].finish_reason

            asked = [pool.submit(ask, i) for i in range(3)]
            url = cluster.worker_urls("prefill")[0]
            wait_for(lambda: value(scrape(url), "kvferry_waiting_tokens") > 1000, 20)
            prefill.kill()
            assert [future.result(timeout=120) for future in asked] == [(12, "length")] * 3
        wait_for(lambda: len(cluster.worker_urls("prefill")) == 1 and cluster.worker_urls("prefill") != [url], 60)
        cluster.settle()
        router = scrape(cluster.url)
        assert value(router, "kvferry_retries_total") >= 1
        again = cluster.client.completions.create(model=MODEL, prompt=ids(200, 30), max_tokens=4)
        assert again.usage is not None


def test_decode_only_and_an_orderly_end() -> None:
    with local_cluster("--prefill", "0", "--decode", "2", "--served-model-name", "tiny") as cluster:
        processes = psutil.Process(cluster.process.pid).children(recursive=True)
        assert len(processes) >= 4
        assert re.search(r"curl .*chat/completions", cluster.ready_line)
        made = cluster.client.chat.completions.with_raw_response.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        )
        assert re.fullmatch(r"prefill=none decode=decode-\d reused=\d+ computed=\d+", made.headers["x-kvferry-route"])
        assert json.loads(made.text)["choices"][0]["message"]["content"]
        cluster.settle()
        began = time.monotonic()
        cluster.process.terminate()
        cluster.process.wait(10)
        assert time.monotonic() - began < 5
        gone, alive = psutil.wait_procs(processes, timeout=1)
        assert not alive
        assert len(gone) == len(processes)
