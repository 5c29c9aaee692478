"""The dashboard against a live cluster scraped by a real Prometheus: every panel's query finds a series."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from local_cluster import MODEL, LocalCluster

from tests.deploy.dashboard import failing_queries, panel_queries
from tests.deploy.prometheus import query, running_prometheus, wait_for, wait_scraped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_every_panel_has_data_and_the_hit_rate_is_real(cluster: LocalCluster) -> None:
    workers = [*cluster.worker_urls("prefill"), *cluster.worker_urls("decode")]
    targets = [url.removeprefix("http://") for url in (cluster.url, *workers)]
    prompt = random.Random(99).choices(range(1000, 40000), k=320)
    with running_prometheus(targets) as base_url:
        wait_scraped(base_url, len(targets))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda tail: ask(cluster, [*prompt, tail]), range(5, 11)))
        hits = 'sum(kvferry_prefix_cache_hits_tokens_total{role="prefill"}) > 0'
        assert wait_for(base_url, hits), "prefix hits were not scraped"
        assert failing_queries(base_url) == []
        assert query(base_url, "sum(kvferry_kv_blocks) == sum(kvferry_kv_pool_blocks)")
    assert len(panel_queries()) > 20


def ask(cluster: LocalCluster, prompt: list[int]) -> None:
    cluster.client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
