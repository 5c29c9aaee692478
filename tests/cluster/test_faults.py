"""Processes die under running requests: no token is lost, repeated or changed, and the books balance afterwards.

In float32, so that recomputing cannot change a token. A tiny model at a set pace: streams last long enough on any
machine for what befalls them."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


ARGUMENTS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--threads", "1", "--kv-blocks", "1000"),
    *("--prefill", "1", "--decode", "2"),
)
SEEDS = itertools.count()
STEP_S = 0.01
"""Seconds that a step of a node lasts at least."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    path = save_checkpoint(tmp_path_factory.mktemp("model"), "LlamaConfig", max_position_embeddings=2048)
    with local_cluster("--model", str(path), *ARGUMENTS, step_s=STEP_S) as running:
        yield running


def prompt(count: int = 120) -> list[int]:
    """Token ids that no other test has asked for, nor this one when it was tried before."""
    return random.Random(next(SEEDS)).choices(range(3, VOCAB), k=count)


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
    asked = prompt()
    undisturbed = stream(cluster, asked, 60)
    assert len(undisturbed) == 60
    killed: list[str] = []

    def kill(node_id: str) -> None:
        killed.append(node_id)
        cluster.worker(node_id).kill()

    assert stream(cluster, asked, 60, at(20, kill)) == undisturbed
    assert killed
    assert value(scrape(cluster.url), "kvferry_retries_total") >= 1
    wait_for(lambda: len(cluster.worker_urls("decode")) == 2, 60)
    wait_for(lambda: value(scrape(cluster.url), "kvferry_nodes", role="decode", state="ready") == 2, 20)
    cluster.settle()


def test_kill_9_after_a_long_output_computes_little_of_it_again(cluster: LocalCluster) -> None:
    """Its blocks were copied to the prefill node meanwhile, and travel from there."""
    kept = value(scrape(cluster.worker_urls("prefill")[0]), "kvferry_copy_blocks_total", way="kept")
    recovered, asked = scrape(cluster.url), prompt()
    made = stream(cluster, asked, 260, at(240, lambda node_id: cluster.worker(node_id).kill()))
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
    assert stream(cluster, asked, 260) == made
    cluster.settle()


def test_a_frozen_prefill_process_does_not_hold_requests_back(cluster: LocalCluster) -> None:
    asked = prompt()
    undisturbed = stream(cluster, asked, 8)
    (prefill,) = cluster.children("prefill")
    prefill.suspend()
    try:
        began = time.monotonic()
        assert len(stream(cluster, prompt(1500), 8)) == 8
        assert time.monotonic() - began < 30
    finally:
        prefill.resume()
    wait_for(lambda: len(cluster.worker_urls("prefill")) == 1, 30)
    assert stream(cluster, asked, 8) == undisturbed
    cluster.settle()


def test_redis_dies_under_a_stream_and_comes_back(cluster: LocalCluster) -> None:
    asked = prompt()
    undisturbed = stream(cluster, asked, 40)
    (valkey,) = cluster.children("valkey-server")
    assert stream(cluster, asked, 40, at(10, lambda _: valkey.kill())) == undisturbed
    assert len(stream(cluster, prompt(), 4)) == 4
    wait_for(lambda: cluster.children("valkey-server") not in ([], [valkey]) and len(cluster.leases()) == 3, 30)
    long = prompt(600)
    stream(cluster, long, 2)
    cluster.settle()

    def reuses() -> bool:
        body = {"model": MODEL, "prompt": long, "max_tokens": 2}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        return int(response.headers["x-kvferry-route"].split("reused=")[1].split()[0]) >= 576

    wait_for(reuses, 20)
    cluster.settle()
