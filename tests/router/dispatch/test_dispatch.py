"""The dispatch of a request over real HTTP: every path, without failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    NoNodes,
    Overloaded,
)
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import Load
from kvferry.protocol.messages import PrefillRequest, TokenDelta, TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch import pending_requests
from kvferry.router.dispatch.prefixes import LOG_INTERVAL_S
from tests.fake_workers import (
    BLOCK,
    PROMPT,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    first_token,
    ids,
    prefill,
    ship_done,
)
from tests.waiting import until


async def test_disaggregated() -> None:
    async with Bench([prefill(), decode()]) as bench:
        dispatch = bench.start(8)
        outputs = await collect(dispatch)
        assert ids(outputs) == expected(PROMPT, 8)
        assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
        assert str(dispatch.route) == "prefill=p1 decode=d1 reused=16 computed=48"
        request = bench["p1"].prefills[0]
        assert request.target == bench["d1"].lease.target
        assert request.job.router_id == "router-test"
        assert request.job.prompt_len == len(PROMPT)
        assert 0 < request.job.deadline_s <= 600
        assert bench.retries() == {}
        assert bench["p1"].cancels == bench["d1"].cancels == []
        assert bench.placements() == {"remote": 1}


async def test_wire_ids_differ_for_equal_request_ids() -> None:
    async with Bench([prefill(), decode()]) as bench:
        results = await asyncio.gather(*(collect(bench.start(6)) for _ in range(8)))
        assert all(ids(outputs) == expected(PROMPT, 6) for outputs in results)
        names = [request.job.request_id for request in bench["p1"].prefills]
        assert len(set(names)) == 8
        assert all(name.startswith("r-") for name in names)


async def test_without_prefill_nodes_decode_computes_the_prompt() -> None:
    async with Bench([decode()]) as bench:
        dispatch = bench.start(5)
        assert ids(await collect(dispatch)) == expected(PROMPT, 5)
        assert str(dispatch.route) == "prefill=none decode=d1 reused=8 computed=56"
        assert bench.placements() == {"local": 1}


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 0}])
async def test_one_token_stays_on_prefill(params: dict[str, Any]) -> None:
    async with Bench([prefill(), decode()]) as bench:
        dispatch = bench.start(1, params=params)
        outputs = await collect(dispatch)
        assert ids(outputs) == expected(PROMPT, 1)
        assert bench["p1"].prefills[0].target is None
        assert str(dispatch.route).startswith("prefill=p1 decode=none")
        assert bench["d1"].jobs == []


async def test_one_token_without_prefill_nodes() -> None:
    async with Bench([decode()]) as bench:
        assert ids(await collect(bench.start(1))) == expected(PROMPT, 1)


async def test_first_token_that_ends_a_longer_request() -> None:
    async def ends(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        first = first_token(request.job)
        delta = TokenDelta(request.job.request_id, 0, 0, (7,), None, "stop", 7, first.delta.reuse)
        yield type(first)(delta, 0.0, 0.0)

    async with Bench([prefill(prefill_script=ends), decode()]) as bench:
        dispatch = bench.start(8)
        outputs = await collect(dispatch)
        assert [(o.token_ids, o.finish_reason, o.stop_token) for o in outputs] == [((7,), "stop", 7)]
        assert str(dispatch.route).startswith("prefill=p1 decode=none")


async def test_decode_tokens_before_the_first_one() -> None:
    async def late(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        worker.peers[request.target.node_id].decode(request.job, 1)
        await asyncio.sleep(0.05)
        yield first_token(request.job)
        yield ship_done(request.job)

    async with Bench([prefill(prefill_script=late), decode()]) as bench:
        dispatch = bench.start(6)
        assert ids(await collect(dispatch)) == expected(PROMPT, 6)
        assert dispatch.route.reuse.reused_prefill == 16


async def test_prompt_logprobs_come_with_the_first_output() -> None:
    entries = (None, *[TokenLogprobs(5, -0.5, 1, ((5, -0.5),))] * (len(PROMPT) - 1))

    async def scoring(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        reuse = Reuse(len(PROMPT), computed=len(PROMPT))
        delta = TokenDelta(request.job.request_id, 0, 0, (), None, "length", None, reuse, entries)
        yield type(first_token(request.job))(delta, 0.0, 0.0)

    async with Bench([prefill(prefill_script=scoring), decode()]) as bench:
        outputs = await collect(bench.start(0, params={"prompt_logprobs": 1}))
        assert [(o.token_ids, o.prompt_logprobs, o.finish_reason) for o in outputs] == [((), entries, "length")]


@pytest.mark.parametrize(
    "account", [Reuse(64, 16, 0, 0, 47), Reuse(64, -16, 0, 0, 80), Reuse(80, 16, 0, 0, 64), Reuse(64, 0, 0, 0, 0)]
)
async def test_a_wrong_account_is_the_nodes_shame_and_not_the_clients(
    account: Reuse, caplog: pytest.LogCaptureFixture
) -> None:
    async def lying(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        first = first_token(request.job)
        yield replace(first, delta=replace(first.delta, reuse=account))
        worker.peers["d1"].decode(request.job, 1)
        yield ship_done(request.job)

    async with Bench([prefill(prefill_script=lying), decode()]) as bench:
        dispatch = bench.start(4)
        assert ids(await collect(dispatch)) == expected(PROMPT, 4)
        assert str(dispatch.route) == "prefill=p1 decode=d1 reused=0 computed=64"
        assert bench.metrics.account_violations._value.get() == 1
    assert ["wrong reuse accounting of 64 tokens from p1" in message for message in caplog.messages].count(True) == 1


async def test_reuse_known_to_the_index_decides_and_is_counted() -> None:
    async with Bench([prefill("p1"), prefill("p2"), decode()]) as bench:
        hashes = chain(root_hash("fp", "tenant"), PROMPT, BLOCK)
        await bench.store.publish("p2", 1, rows_of(hashes[:10]), ())
        for _ in range(3):
            await collect(bench.start(3, namespace="tenant"))
        assert [len(bench[p].prefills) for p in ("p1", "p2")] == [0, 3]
        counted = bench.metrics.reuse.of("m")
        assert counted.predicted._value.get() == 3 * 40
        assert counted.actual._value.get() == 3 * 16
        assert counted.misses["evicted"]._value.get() == 3 * 24


async def test_a_slow_index_costs_little_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.router.dispatch.prefixes")

    class Slow:
        async def longest_prefix(self, hashes: Any, nodes: Any) -> dict[str, int]:
            await asyncio.sleep(30)
            return {}

        async def holders(self, rows: Any, nodes: Any) -> list[frozenset[str]]:
            raise AssertionError("of no model with recurrent layers")

    async with Bench([prefill(), decode()]) as bench:
        asked = bench.cluster._prefixes
        index, asked._lookup = asked._lookup, Slow()
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            assert ids(await collect(bench.start(3))) == expected(PROMPT, 3)
        assert asyncio.get_running_loop().time() - began < 2
        asked._lookup = index
        for since_s in (0.0, -LOG_INTERVAL_S):
            asked._logged_at += since_s
            for _ in range(3):
                await collect(bench.start(3))
            assert ["block index" in message for message in caplog.messages].count(True) == (2 if since_s else 1)


async def test_registry_away() -> None:
    async with Bench([prefill(), decode()]) as bench:
        bench.store.available = False
        await until(lambda: not bench.nodes.registry_health.up)
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)
        assert bench.metrics.registry_up._value.get() == 0
        bench.store.available = True
        await until(lambda: bench.nodes.registry_health.up)


async def test_nothing_can_be_placed() -> None:
    async with Bench([prefill()], max_wait_s=0.1) as bench:
        assert not bench.cluster.ready()["decode"]
        with pytest.raises(NoNodes) as caught:
            await collect(bench.start(4))
        assert caught.value.retry_after == 2.0


FULL = Load(active_blocks=100, total_blocks=100, waiting_tokens=1400)


async def test_full_decode_nodes_refuse_with_a_time(monkeypatch) -> None:
    """At once where many wait for them already, else after a while."""
    async with Bench([decode(changes={"load": FULL})], max_wait_s=0.2) as bench:
        with pytest.raises(Overloaded) as caught:
            await collect(bench.start(4))
        assert caught.value.retry_after >= 1
        assert bench.cluster.held.requests == 0
        monkeypatch.setattr(pending_requests, "MAX_WAITING", 0)
        with pytest.raises(Overloaded):
            bench.start(4)


async def test_who_comes_while_all_are_full_waits_for_room() -> None:
    """A single node that hung for a moment made the other full: newcomers were sent away at once."""
    async with Bench([decode(changes={"load": FULL})], max_wait_s=20) as bench:
        waiting = asyncio.create_task(collect(bench.start(4)))
        await until(lambda: bench.cluster.held.requests == 1)
        await bench.store.announce(replace(bench["d1"].lease, load=Load(free_blocks=100, total_blocks=100)))
        assert ids(await waiting) == expected(PROMPT, 4)
        assert bench.cluster.held.requests == 0


async def test_a_prompt_that_fits_into_no_pool() -> None:
    async with Bench([decode(changes={"load": Load(free_blocks=8, total_blocks=8)})]) as bench:
        with pytest.raises(ContextLengthExceeded, match="maximum context length"):
            await collect(bench.start(4))


async def test_deadline() -> None:
    async with Bench([decode(step_s=0.05)]) as bench:
        with pytest.raises(DeadlineExceeded):
            await collect(bench.start(1000, deadline_s=0.3))
        await until(lambda: bench["d1"].running == 0)


async def test_a_deadline_that_passed_before_the_dispatch_began() -> None:
    async with Bench([prefill(), decode()]) as bench:
        with pytest.raises(DeadlineExceeded):
            await collect(bench.start(1000, deadline_s=-1.0))
        await until(lambda: bench["d1"].running == 0)


async def test_info_and_ready() -> None:
    async with Bench([prefill(), decode(changes={"max_model_len": 2048})]) as bench:
        info = bench.cluster.info()
        assert (info.model, info.max_model_len) == ("m", 2048)
        assert bench.cluster.ready() == {"prefill": 1, "decode": 1}
