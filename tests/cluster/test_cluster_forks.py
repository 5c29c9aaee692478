"""n choices of one prompt on real nodes: the prompt is computed once, and every choice is what it would be alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.kernels.cpu import instruction_sets
from tests.crowded import crowded
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension"),
]
N = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two decode nodes. What is copied and what is computed must not differ in a bit."""
    with local_cluster("--decode", "2", "--batch-invariant") as cluster:
        yield cluster
        cluster.settle()


def computed(cluster: LocalCluster) -> float:
    """Prompt tokens that all nodes have computed."""
    urls = [*cluster.worker_urls("prefill"), *cluster.worker_urls("decode")]
    return sum(value(scrape(url), "kvferry_step_tokens_total", phase="prefill") for url in urls)


def complete(cluster: LocalCluster, **body: Any) -> list[list[int]]:
    """Token ids of the choices."""
    body = {"model": MODEL, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True, **body}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("max_tokens", [1, 12])
@pytest.mark.parametrize("length", [200, 203, 208])
def test_choices_compute_the_prompt_once_and_are_what_they_are_alone(
    cluster: LocalCluster, length: int, max_tokens: int
) -> None:
    seed = 1000 * length + max_tokens
    prompt = random.Random(seed).choices(range(1000, 40000), k=length)
    cluster.settle()
    before = computed(cluster)
    choices = complete(cluster, prompt=prompt, n=N, seed=seed, max_tokens=max_tokens)
    cluster.settle()
    more = computed(cluster) - before - length - N + 1
    assert more == 0 or (more > 0 and crowded()), "late choices have second attempts, or go to nodes that are not late"
    assert choices == [complete(cluster, prompt=prompt, seed=seed + i, max_tokens=max_tokens)[0] for i in range(N)]
    assert len(set(map(tuple, choices))) > 1
