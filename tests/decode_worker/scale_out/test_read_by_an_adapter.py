"""A decode node read by the client that kvferry itself has for vLLM servers: tokens, model list, load and KV events."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from typing import Any

from kvferry.engine_adapter.cache_mirror import CacheMirror
from kvferry.engine_adapter.engine import EngineCall, EngineDelta, KvEventSource
from kvferry.engine_adapter.engines.vllm import VllmEngine
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.kv_events import KvEvents, follow
from kvferry.protocol.sampling import SamplingParams
from tests.toy import FINGERPRINT, VOCAB, expected, make_engine
from tests.waiting import until
from tests.worker_pair import worker

KEY = "key of the adapter"


async def test_tokens_models_and_load() -> None:
    settings: dict[str, Any] = {"enable_scale_out": True, "vllm_metrics": True, "scale_out_api_key": KEY}
    async with worker("decode", make_engine(), **settings) as node:
        engine = VllmEngine(EngineHttp(node.node.address.url, lambda: KEY))
        facts = await engine.facts()
        assert (facts.served_names, facts.max_model_len) == (("toy",), 256)
        assert (facts.block_size, facts.total_blocks, facts.kv_events) == (4, 64, None)
        prompt, params = tuple(range(20)), SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
        for cached in (0, 16):
            deltas: list[EngineDelta] = []
            await engine.generate(EngineCall("r", prompt, params), deltas.append)
            assert [token for each in deltas for token in each.token_ids] == expected(list(prompt), 12)
            assert (deltas[-1].finish_reason, deltas[-1].cached_tokens) == ("length", cached)
            scores = [score for each in deltas for score in each.logprobs or ()]
            assert [score.token_id for score in scores] == expected(list(prompt), 12)
        load = await engine.load()
        assert (load.running_requests, load.waiting_requests, load.cache_usage) == (0, 0, 0.0)
        await engine.close()
        await node.settle()


async def test_a_mirror_of_the_events_has_the_rows_of_the_node() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = KvEventSource(f"ipc://{folder}/events", f"ipc://{folder}/replays", "kv")
        config = json.dumps({"endpoint": source.endpoint, "replay_endpoint": source.replay, "topic": source.topic})
        async with worker("decode", make_engine(24), enable_scale_out=True, kv_events_config=config) as node:
            engine = VllmEngine(EngineHttp(node.node.address.url))
            facts = await engine.facts()
            assert facts.kv_events is not None
            assert facts.kv_events.topic == "kv"
            mirror = CacheMirror(FINGERPRINT, 4, total_blocks=24)
            events = KvEvents(source)
            following = asyncio.create_task(follow(events, mirror, lambda: None))
            for seed in range(20):
                draw = random.Random(seed)
                prompt = tuple(random.Random(seed % 5).choices(range(VOCAB), k=draw.randint(1, 40)))
                params = SamplingParams(max_tokens=9, temperature=0.0)
                await engine.generate(EngineCall(f"r{seed}", prompt, params), lambda delta: None)
                await until(lambda: sorted(mirror.rows()) == sorted(node.engine.pool.changes.rows()))
            assert mirror.removed > 0
            assert (mirror.skipped.total(), events.counters.malformed, events.counters.unknown) == (0, 0, 0)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await engine.close()
            await node.settle()
