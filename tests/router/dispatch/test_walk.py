"""How many files one must read to follow a request that meets no trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvferry.protocol.messages import PrefillRequest
from tests.fake_workers import PROMPT, Bench, FakeWorker, collect, decode, expected, honest_prefill, ids, prefill
from tests.walk import Walk


async def test_thirty_two_files_from_a_spec_to_the_post_to_prefill() -> None:
    walk = Walk("router", "placement")

    async def arrived(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        walk.stop()
        async for message in honest_prefill(worker, request):
            yield message

    async with Bench([prefill(prefill_script=arrived), decode()]) as bench:
        await collect(bench.start(4))
        with walk:
            dispatch = bench.start(4)
            assert ids(await collect(dispatch)) == expected(PROMPT, 4)
    assert set(walk.files) == {
        "router/dispatch/model_cluster.py",
        "router/dispatch/dispatch.py",
        "router/dispatch/prefixes.py",
        "router/dispatch/inflight_prefixes.py",
        "router/dispatch/timers.py",
        "router/dispatch/jobs.py",
        "router/dispatch/attempt_planner.py",
        "router/dispatch/pending_requests.py",
        "router/dispatch/prediction.py",
        "router/request_context.py",
        "router/request_log.py",
        "router/dispatch/hedging.py",
        "router/dispatch/hedged_attempts.py",
        "router/dispatch/token_order.py",
        "router/dispatch/migration.py",
        "router/dispatch/token_sink.py",
        "router/dispatch/attempt.py",
        "router/dispatch/background_calls.py",
        "router/nodes/node_entry.py",
        "router/nodes/capacity_summary.py",
        "router/nodes/reservations.py",
        "router/nodes/client.py",
        "router/nodes/model_nodes.py",
        "placement/place.py",
        "placement/pairs.py",
        "placement/costs.py",
        "placement/uncached_nodes.py",
        "placement/types.py",
        "placement/blocks.py",
        "placement/fetching.py",
        "placement/tier_reads.py",
        "placement/cache_value.py",
    }
