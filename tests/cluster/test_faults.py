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

from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    arguments = ("--dtype", "float32", "--prefill", "1", "--decode", "2", "--kv-cache-gib", "0.5")
    with local_cluster(*arguments, forked=False) as running:
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


def at(count: int, deed: Callable[[str], object]) -> Callable[[int, str], None]:
    """Done once, to the node that decodes the stream, when so many tokens are out."""
    done: list[str] = []

    def on_token(made: int, route: str) -> None:
        if made >= count and not done:
            done.append(next(word for word in route.split() if word.startswith("decode=")).removeprefix("decode="))
            deed(done[0])

    return on_token


def test_kill_9_of_the_decode_process_mid_stream(cluster: LocalCluster) -> None:
    undisturbed = stream(cluster, prompt(1), 60)
    assert len(undisturbed) == 60
    killed: list[str] = []

    def kill(node_id: str) -> None:
        killed.append(node_id)
        cluster.worker(node_id).kill()

    assert stream(cluster, prompt(1), 60, at(20, kill)) == undisturbed
    assert killed
    assert value(scrape(cluster.url), "kvferry_ladder_rungs_total") >= 1
    wait_for(lambda: len(cluster.worker_urls("decode")) == 2, 60)
    wait_for(lambda: value(scrape(cluster.url), "kvferry_nodes", role="decode", state="ready") == 2, 20)
    cluster.settle()


def test_kill_9_after_a_long_output_computes_little_of_it_again(cluster: LocalCluster) -> None:
    """Its blocks were copied to the prefill node meanwhile, and travel from there."""
    kept = value(scrape(cluster.worker_urls("prefill")[0]), "kvferry_copy_blocks_total", way="kept")
    recovered = scrape(cluster.url)
    made = stream(cluster, prompt(9), 260, at(240, lambda node_id: cluster.worker(node_id).kill()))
    now = scrape(cluster.url)
    cached, computed = (
        value(now, "kvferry_recovered_tokens_total", source=source)
        - value(recovered, "kvferry_recovered_tokens_total", source=source)
        for source in ("cached", "computed")
    )
    assert cached + computed >= 120 + 240
    assert computed <= 200, "without copies it is 240"
    assert value(scrape(cluster.worker_urls("prefill")[0]), "kvferry_copy_blocks_total", way="kept") >= kept + 8
    wait_for(lambda: value(scrape(cluster.url), "kvferry_nodes", role="decode", state="ready") == 2, 60)
    assert stream(cluster, prompt(9), 260) == made
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
