"""How many files one must read to follow a request that meets no trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fake_workers import PROMPT, Bench, FakeWorker, collect, decode, expected, honest_prefill, ids, prefill
from walk import Walk

from kvferry.protocol.messages import PrefillRequest


async def test_twenty_nine_files_from_a_spec_to_the_post_to_prefill() -> None:
    walk = Walk("router", "placement")

    async def arrived(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        walk.stop()
        async for message in honest_prefill(worker, request):
            yield message

    async with Bench([prefill(prefill_script=arrived), decode()]) as bench:
        await collect(bench.start(4))
        with walk:
            journey = bench.start(4)
            assert ids(await collect(journey)) == expected(PROMPT, 4)
    assert set(walk.files) == {
        "router/journey/model_cluster.py",
        "router/journey/journey.py",
        "router/journey/prefixes.py",
        "router/journey/underway.py",
        "router/journey/alarms.py",
        "router/journey/jobs.py",
        "router/journey/course.py",
        "router/journey/held.py",
        "router/journey/prediction.py",
        "router/journey/chronicle.py",
        "router/journey/race.py",
        "router/journey/listening.py",
        "router/journey/attempt.py",
        "router/journey/errands.py",
        "router/nodes/entry.py",
        "router/nodes/room.py",
        "router/nodes/book.py",
        "router/nodes/client.py",
        "router/nodes/group.py",
        "router/nodes/connection.py",
        "placement/place.py",
        "placement/pairs.py",
        "placement/costs.py",
        "placement/plain.py",
        "placement/terms.py",
        "placement/blocks.py",
        "placement/fetching.py",
        "placement/reading.py",
        "placement/worth.py",
    }
