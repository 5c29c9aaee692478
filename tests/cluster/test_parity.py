"""A cluster gives transformers' own float32 tokens, and those that one engine samples; more of one engine alone is in
tests/engine/test_local_parity.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.protocol.sampling import SamplingParams
from tests.cluster.local_tokens import GREEDY, SAMPLED, SOME, check, sampled_locally
from tests.cluster.oracle import prompts
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def float32_cluster() -> Iterator[LocalCluster]:
    with local_cluster("--dtype", "float32", "--kv-cache-gib", "1.2") as cluster:
        yield cluster


def test_disaggregated_tokens_over_ucx(float32_cluster: LocalCluster) -> None:
    client = float32_cluster.client

    def ask(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        made = client.completions.create(
            model=MODEL,
            prompt=list(prompt),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            extra_body={"top_k": params.top_k, "ignore_eos": True, "return_token_ids": True},
        )
        return list(made.choices[0].token_ids)  # type: ignore[attr-defined]

    with ThreadPoolExecutor(4) as pool:
        check(list(pool.map(lambda prompt: ask(prompt, GREEDY), prompts())), "disaggregated")
        assert list(pool.map(lambda prompt: ask(prompt, SAMPLED), prompts()[:SOME])) == sampled_locally()
    router = scrape(float32_cluster.url)
    assert value(router, "kvferry_placements_total", kind="remote") >= 15
    float32_cluster.settle()
