"""Processes die under running requests: no token is lost, repeated or changed, and the books balance afterwards.

In float32, so that recomputing cannot change a token.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster("--dtype", "float32", "--prefill", "1", "--decode", "2", "--kv-cache-gib", "0.5") as running:
        yield running


def prompt(seed: int, count: int = 120) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=count)


def stream(
    cluster: LocalCluster,
    token_ids: list[int],
    count: int,
    on_token: Callable[[int, str], None] = lambda n, route: None,
) -> list[int]:
    """Token ids of a greedy stream; `on_token(how many so far, route)` is called after each chunk."""
    body = {"model": MODEL, "prompt": token_ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    made: list[int] = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                made += chunk["choices"][0].get("token_ids") or []
                on_token(len(made), response.headers["x-kvferry-route"])
    return made


def test_kill_9_of_the_decode_process_mid_stream(cluster: LocalCluster) -> None:
    undisturbed = stream(cluster, prompt(1), 60)
    assert len(undisturbed) == 60
    killed: list[str] = []

    def kill(count: int, route: str) -> None:
        if count >= 20 and not killed:
            node_id = next(word for word in route.split() if word.startswith("decode=")).removeprefix("decode=")
            killed.append(node_id)
            for process in cluster.children("decode"):
                if node_id in " ".join(process.cmdline()):
                    process.kill()

    assert stream(cluster, prompt(1), 60, kill) == undisturbed
    assert killed
    assert value(scrape(cluster.url), "kvferry_ladder_rungs_total") >= 1
    wait_for(lambda: len(cluster.worker_urls("decode")) == 2, 60)
    wait_for(lambda: value(scrape(cluster.url), "kvferry_nodes", role="decode", state="ready") == 2, 20)
    cluster.settle()


def test_a_frozen_prefill_process_does_not_hold_requests_back(cluster: LocalCluster) -> None:
    undisturbed = stream(cluster, prompt(2), 8)
    (prefill,) = cluster.children("prefill")
    prefill.suspend()
    try:
        began = time.monotonic()
        assert len(stream(cluster, prompt(3, 1500), 8)) == 8
        assert time.monotonic() - began < 30
    finally:
        prefill.resume()
    wait_for(lambda: len(cluster.worker_urls("prefill")) == 1, 30)
    assert stream(cluster, prompt(2), 8) == undisturbed
    cluster.settle()


def test_redis_dies_under_a_stream_and_comes_back(cluster: LocalCluster) -> None:
    undisturbed = stream(cluster, prompt(4), 40)

    def kill(count: int, route: str) -> None:
        if count == 10:
            for process in cluster.children("valkey-server"):
                process.kill()

    assert stream(cluster, prompt(4), 40, kill) == undisturbed
    assert len(stream(cluster, prompt(5), 4)) == 4
    wait_for(lambda: len(cluster.children("valkey-server")) == 1 and len(cluster.leases()) == 3, 30)
    long = prompt(6, 600)
    stream(cluster, long, 2)
    cluster.settle()

    def reuses() -> bool:
        body = {"model": MODEL, "prompt": long, "max_tokens": 2}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        return int(response.headers["x-kvferry-route"].split("reused=")[1].split()[0]) >= 576

    wait_for(reuses, 20)
    cluster.settle()
