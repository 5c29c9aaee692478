"""An encode node in a whole cluster, with a real vision tower: it encodes a picture once for each tenant, the prompt's
node fetches the rows, and the answers are those of a cluster without encode nodes, whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.crowded import in_time
from tests.engine.tiny_vision import part, picture, save
from tests.local_cluster import LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = ("--dtype", "float32", "--kv-blocks", "2000", "--threads", "1", "--prefill", "1", "--decode", "1")
LATE_S = 3.0
"""Seconds that a lost encode node may cost."""
PICTURES = [picture(60, 40, seed) for seed in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save("smolvlm", path := tmp_path_factory.mktemp("models") / "seer")
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> list[str]:
    """Of the nodes that compute the prompts, about each picture."""
    with local_cluster("--model", str(model), *FLAGS) as plain:
        return [ask(plain, each) for each in PICTURES]


@pytest.fixture(scope="module")
def cluster(model: Path, answers: list[str]) -> Iterator[LocalCluster]:
    with local_cluster("--model", str(model), *FLAGS, "--encode", "1") as running:
        yield running


def ask(cluster: LocalCluster, image: Image.Image, question: str = "What is it?", **more: Any) -> str:
    messages = [{"role": "user", "content": [part(question), part(image)]}]
    body = {"model": "seer", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120).json()
    assert "error" not in answer, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


def encoder(cluster: LocalCluster) -> str:
    (url,) = cluster.worker_urls("encode")
    return url


def encoded(cluster: LocalCluster) -> float:
    return value(scrape(encoder(cluster)), "kvferry_media_items_total", outcome="encoded")


def calls(cluster: LocalCluster) -> dict[str, float]:
    return {labels["outcome"]: n for labels, n in scrape(cluster.url)["kvferry_encode_calls_total"] if n}


def own(cluster: LocalCluster) -> float:
    """Pictures that nodes which compute prompts encoded."""
    urls = cluster.worker_urls("prefill") + cluster.worker_urls("decode")
    return sum(value(scrape(url), "kvferry_media_items_total", outcome="encoded") for url in urls)


def fetched(cluster: LocalCluster) -> float:
    urls = cluster.worker_urls("prefill") + cluster.worker_urls("decode")
    return sum(value(scrape(url), "kvferry_fetches_total", outcome="done") for url in urls)


def test_an_encode_node_makes_the_rows_once(cluster: LocalCluster, answers: list[str]) -> None:
    assert ask(cluster, PICTURES[0]) == answers[0]
    assert (encoded(cluster), own(cluster), fetched(cluster)) == (1, 0, 1)
    assert calls(cluster) == {"encoded": 1}
    assert value(scrape(encoder(cluster)), "kvferry_media_renders_total") == 1, "it makes the prompts, too"
    assert ask(cluster, PICTURES[0], "Once more: what is it?")
    assert (encoded(cluster), own(cluster)) == (1, 0)
    assert httpx.get(f"{cluster.url}/ready?nodes=1").json()["nodes"] == {"prefill": 1, "decode": 1, "encode": 1}
    cluster.settle()


def test_tenants_share_no_rows(cluster: LocalCluster) -> None:
    before = encoded(cluster)
    assert ask(cluster, PICTURES[0], cache_salt="another") == ask(cluster, PICTURES[0])
    assert encoded(cluster) == before + 1


def test_an_encode_node_that_hangs_costs_a_moment(cluster: LocalCluster, answers: list[str]) -> None:
    (process,) = cluster.children("encode")
    process.suspend()
    try:
        began = time.monotonic()
        assert ask(cluster, PICTURES[1]) == answers[1]
        assert in_time(time.monotonic() - began, LATE_S + usual_s(cluster))
        assert own(cluster) == 1
    finally:
        process.resume()
    cluster.settle()


def test_an_encode_node_that_dies_costs_a_moment(cluster: LocalCluster, answers: list[str]) -> None:
    (process,) = cluster.children("encode")
    before = own(cluster)
    process.kill()
    began = time.monotonic()
    assert ask(cluster, PICTURES[2]) == answers[2]
    assert in_time(time.monotonic() - began, LATE_S + usual_s(cluster))
    assert own(cluster) == before + 1
    wait_for(lambda: new_encoder(cluster, process), 60.0)
    assert ask(cluster, PICTURES[3]) == answers[3]
    assert encoded(cluster) == 1, "its successor works"
    cluster.settle()


def test_an_encode_node_that_dies_with_media_in_hand_costs_a_moment(cluster: LocalCluster, answers: list[str]) -> None:
    """It is killed while it has calls open, which a stopped process keeps open for sure."""
    limit_s = LATE_S + len(PICTURES[4:]) * usual_s(cluster)
    (process,) = cluster.children("encode")
    process.suspend()
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(ask, cluster, image) for image in PICTURES[4:]]
        time.sleep(0.3)
        process.kill()
        assert [each.result() for each in asked] == answers[4:]
    assert in_time(time.monotonic() - began, limit_s)
    wait_for(lambda: new_encoder(cluster, process), 60.0)
    cluster.settle()


def test_a_prompt_on_two_ranks_fetches_rows(model: Path, answers: list[str]) -> None:
    """The ranks share a pool, and their first one looks for the rows."""
    with local_cluster("--model", str(model), *FLAGS, "--encode", "1", "-tp", "2") as cluster:
        assert ask(cluster, PICTURES[0]) == answers[0]
        assert (encoded(cluster), own(cluster), fetched(cluster)) == (1, 0, 1)
        cluster.settle()


def usual_s(cluster: LocalCluster) -> float:
    """Seconds of an answer on this machine now."""
    began = time.monotonic()
    ask(cluster, PICTURES[0])
    return time.monotonic() - began


def new_encoder(cluster: LocalCluster, former: psutil.Process) -> bool:
    """Whether the router knows the process that replaced the former one."""
    alive = [child for child in cluster.children("encode") if child.pid != former.pid]
    nodes = httpx.get(f"{cluster.url}/ready?nodes=1").json()["nodes"]
    return bool(alive) and nodes.get("encode") == 1
