"""vLLM's metric names on a decode node."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.decode_worker.scale_out.generate_client import Client, client_of
from tests.toy import make_engine
from tests.waiting import until
from tests.worker_pair import worker

PROMPT = list(range(20))


async def samples(client: Client) -> dict[str, float]:
    """All samples under vLLM's names that have the model's label only, by name."""
    found = {}
    for family in text_string_to_metric_families((await client.http.get("/metrics")).text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "toy"
                if len(sample.labels) == 1:
                    found[sample.name] = sample.value
    return found


async def test_counters_and_gauges_tell_what_the_node_did() -> None:
    settings: dict[str, Any] = {"enable_scale_out": True, "vllm_metrics": True}
    async with worker("decode", make_engine(), **settings) as node, client_of(node) as client:
        assert (await samples(client))["vllm:generation_tokens_total"] == 0
        for _ in range(2):
            await client.whole(PROMPT)
        now = await samples(client)
        assert now["vllm:prompt_tokens_total"] == now["vllm:prefix_cache_queries_total"] == 40
        assert now["vllm:prefix_cache_hits_total"] == 16
        assert now["vllm:generation_tokens_total"] == 16
        assert now["vllm:time_to_first_token_seconds_count"] == 2
        assert now["vllm:inter_token_latency_seconds_count"] == 14
        assert now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0
        assert now["vllm:kv_cache_usage_perc"] == 0
        node.pause_at(2)
        asked = asyncio.create_task(client.whole(PROMPT))
        await until(lambda: node.paused)
        now = await samples(client)
        assert now["vllm:num_requests_running"] == 1
        assert now["vllm:kv_cache_usage_perc"] == 6 / 64
        node.resume()
        await asked
        text = (await client.http.get("/metrics")).text
        assert 'vllm:cache_config_info{block_size="4",model_name="toy",num_gpu_blocks="64"} 1.0' in text
        await node.settle()
        assert node.service._vllm_metrics._last == {}


async def test_the_guide_names_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "own-nodes-as-engines.md").read_text()
    async with worker("decode", make_engine(), vllm_metrics=True) as node, client_of(node) as client:
        families = text_string_to_metric_families((await client.http.get("/metrics")).text)
        exposed = {
            each.name + ("_total" if each.type == "counter" else "")
            for each in families
            if each.name.startswith("vllm:") and not each.name.endswith("_created")
        }
    assert set(re.findall(r"`(vllm:\w+)`", page)) == exposed


async def test_without_the_flag_there_are_none() -> None:
    async with worker("decode", make_engine()) as node, client_of(node) as client:
        assert await samples(client) == {}
