"""From whom a prompt's node is told to fetch, and what is predicted then."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import Load, Rates
from kvferry.protocol.messages import Job
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch.interface import Route
from tests.fake_workers import BLOCK, PROMPT, Bench, collect, decode, expected, ids, prefill

BUSY = Load(free_blocks=1000, total_blocks=1000, waiting_tokens=10_000_000)
SLOW, QUICK = Rates(prefill_tokens_per_s=100.0), Rates(prefill_tokens_per_s=100_000.0)
HELD = 10


async def job_of(bench: Bench, **spec: Any) -> Job:
    """Of a prompt whose first blocks a busy node holds."""
    await bench.store.publish("p2", 1, rows_of(chain(root_hash("fp"), PROMPT, BLOCK)[:HELD]), ())
    outputs = await collect(bench.start(4, **spec))
    assert ids(outputs) == expected(PROMPT, 4)
    (asked,) = bench["p1"].prefills
    return asked.job


def workers() -> list[Any]:
    return [
        prefill("p1", changes={"rates": SLOW}),
        prefill("p2", changes={"rates": QUICK, "load": BUSY}),
        decode("d1", changes={"rates": SLOW}),
    ]


async def test_a_node_fetches_from_a_busy_one_that_holds_the_prefix() -> None:
    async with Bench(workers()) as bench:
        job = await job_of(bench)
        assert job.holder is not None
        assert (job.holder.node, job.holder.blocks) == (bench["p2"].lease.target, HELD)
        assert job.predicted == (HELD * BLOCK, 1), "what it fetches is expected to be found"


async def test_none_is_named_where_fetches_are_switched_off() -> None:
    async with Bench(workers(), fetch=False) as bench:
        job = await job_of(bench)
        assert job.holder is None
        assert job.predicted == (0, 1)


@pytest.mark.parametrize("namespace", ["", "tenant"])
async def test_another_tenants_prefix_is_none(namespace: str) -> None:
    async with Bench(workers()) as bench:
        job = await job_of(bench, namespace=namespace)
        assert (job.holder is None) == bool(namespace)


def test_the_route_tells_what_was_fetched_of_the_reused() -> None:
    reuse = Reuse(64, reused_prefill=8, fetched=32, computed=24)
    assert str(Route("p1", "d1", reuse)) == "prefill=p1 decode=d1 reused=40 computed=24 fetched=32"
    assert str(Route("p1", "d1", Reuse(64, computed=64))) == "prefill=p1 decode=d1 reused=0 computed=64"
