"""Which node keeps copies of a stream, and what an operator sees of the recoveries that they make cheap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.protocol.messages import DecodeTarget, Job, PrefillRequest
from tests.fake_workers import PROMPT, Bench, FakeWorker, collect, decode, expected, ids, prefill


def jobs(worker: FakeWorker) -> Sequence[Job]:
    """As the router sent them."""
    return [request.job for request in worker.prefills] or worker.jobs


def named(target: DecodeTarget | None) -> str:
    return target.node_id if target else ""


async def test_it_is_the_node_that_computes_the_prompt() -> None:
    async with Bench([prefill("p1"), prefill("p2"), decode("d1"), decode("d2")]) as bench:
        for _ in range(3):
            await collect(bench.start(4))
        for worker in (bench["p1"], bench["p2"]):
            assert all(job.buddy == worker.lease.target for job in jobs(worker))
        assert bench["p1"].prefills
        assert bench["p2"].prefills


async def test_where_no_node_computes_prompts_it_is_another_decode_node() -> None:
    async with Bench([decode("d1"), decode("d2")]) as bench:
        for _ in range(3):
            await collect(bench.start(4))
        for worker, other in (("d1", "d2"), ("d2", "d1")):
            assert {named(job.buddy) for job in jobs(bench[worker])} == {other}


async def test_decode_nodes_that_compute_prompts_themselves_have_all_that_work_for_buddies() -> None:
    """The first one was everybody's buddy, for nothing was placed there; and it might be one that is suspected."""
    async with Bench([prefill("p1"), prefill("p2"), prefill("p3"), decode("d1")]) as bench:
        bench.nodes.breakers.node_failed(("p3", 1))
        chosen = {named(bench.cluster._buddy(None, bench["d1"].lease)) for _ in range(64)}
        assert chosen == {"p1", "p2"}


@pytest.mark.parametrize("only", [[decode("d1")], [prefill("p1")]])
async def test_a_node_alone_has_none(only: list[FakeWorker]) -> None:
    async with Bench(only) as bench:
        most = 1 if only[0].role == "prefill" else 4
        assert ids(await collect(bench.start(most))) == expected(PROMPT, most)
        assert [job.buddy for job in jobs(only[0])] == [None]


async def test_there_is_none_where_they_are_switched_off() -> None:
    async with Bench([prefill(), decode("d1"), decode("d2")], buddies=False) as bench:
        await collect(bench.start(4))
        assert [job.buddy for job in jobs(bench["p1"])] == [None]


async def test_what_a_recovery_reused_and_computed_is_counted() -> None:
    async with Bench([prefill(), decode("d1", crash_after=5), decode("d2")]) as bench:
        outputs = await collect(bench.start(12))
        while len(bench["p1"].prefills) == 1:  # it went to the node that does not crash
            outputs = await collect(bench.start(12))
        assert ids(outputs) == expected(PROMPT, 12)
        again: PrefillRequest = bench["p1"].prefills[-1]
        cached, computed = (bench.metrics.recovered[source]._value.get() for source in ("cached", "computed"))
        assert cached + computed == len(again.job.token_ids) > len(PROMPT)
        assert named(again.job.buddy) == "p1"
