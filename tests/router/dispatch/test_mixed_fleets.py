"""Nodes of two fingerprints serve one model side by side, and no request mixes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest

import kvferry.router.dispatch.hedging
from kvferry.protocol.errors import ContextLengthExceeded, NoNodes
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import Load, Rates
from kvferry.protocol.messages import AttemptFailed, PrefillRequest
from kvferry.router.dispatch.dispatch import RequestDispatch
from tests.fake_workers import (
    BLOCK,
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    honest_prefill,
    ids,
    lease_of,
    prefill,
)
from tests.waiting import until

MOST = 120


def new(worker: FakeWorker, **changes: Any) -> FakeWorker:
    """The same worker of the next version, whose processes start after those of the first one."""
    worker.changes, worker.epoch = {**worker.changes, "fingerprint": "new", **changes}, 2
    return worker


def uneven() -> list[FakeWorker]:
    """Nodes take turns out of step with their versions."""
    return [prefill("p1"), prefill("p3"), decode("d1"), new(prefill("p2")), new(decode("d2")), new(decode("d4"))]


def fingerprints(workers: Iterable[FakeWorker]) -> dict[str, set[str]]:
    """The fingerprints of the nodes that each request on the wire has been to, or was to go to."""
    seen: dict[str, set[str]] = {}
    for worker in workers:
        for job in (*worker.jobs, *(each.job for each in worker.prefills)):
            seen.setdefault(job.request_id, set()).add(worker.lease.fingerprint)
            if job.buddy:
                seen[job.request_id].add(job.buddy.fingerprint)
        for each in worker.prefills:
            if each.target:
                seen[each.job.request_id].add(each.target.fingerprint)
    return seen


def works(worker: FakeWorker) -> int:
    return len(worker.prefills) + len(worker.jobs)


async def begun(bench: Bench, **spec: Any) -> tuple[FakeWorker, RequestDispatch, asyncio.Task[list[int]]]:
    """A stream with tokens out: its decode node, and all its tokens once it has ended."""

    async def tokens() -> list[int]:
        return ids(await collect(dispatch))

    dispatch = bench.start(MOST, **spec)
    task = asyncio.create_task(tokens())
    await until(lambda: any(worker.running and worker._deltas > 3 for worker in bench.workers.values()))
    return next(worker for worker in bench.workers.values() if worker.running), dispatch, task


async def added(bench: Bench, *workers: FakeWorker) -> None:
    for worker in workers:
        await bench.add(worker)
    await until(lambda: all((entry := bench.nodes.entries.get((w.node_id, w.epoch))) and entry.open for w in workers))


async def withdrawn(bench: Bench, worker: FakeWorker) -> None:
    """It drains, ends when it has nothing left, and is gone from the registry."""
    worker.lease = replace(worker.lease, state="draining")
    await bench.store.announce(worker.lease)
    entry = bench.nodes.entries[worker.node_id, worker.epoch]
    await until(lambda: entry.drains and entry.idle and not worker.running)
    await bench.store.withdraw(worker.node_id, worker.epoch)
    await worker.stop()
    await until(lambda: entry.key not in bench.nodes.entries)


async def test_both_versions_take_requests_and_no_request_mixes_them() -> None:
    async with Bench(uneven()) as bench:
        for _ in range(4):
            outputs = await asyncio.gather(*(collect(bench.start(4)) for _ in range(4)))
            assert [ids(each) for each in outputs] == [expected(PROMPT, 4)] * 4
        assert all(works(worker) for worker in bench.workers.values())
        seen = fingerprints(bench.workers.values())
        assert len(seen) == 16
        assert {len(each) for each in seen.values()} == {1}


async def test_equal_versions_take_turns_by_node() -> None:
    """Not by version: the only node of the new one gets no half of the load."""
    async with Bench([decode("d1"), decode("d2"), decode("d3"), new(decode("d4"))]) as bench:
        for _ in range(12):
            await collect(bench.start(2))
        assert [len(bench[each].jobs) for each in ("d1", "d2", "d3", "d4")] == [3, 3, 3, 3]


async def test_a_version_whose_queue_is_longer_gets_less() -> None:
    slow = new(decode("d2"), load=Load(waiting_tokens=10_000, free_blocks=1000, total_blocks=1000))
    async with Bench([decode("d1"), slow]) as bench:
        for _ in range(6):
            await collect(bench.start(2))
        assert [len(bench[each].jobs) for each in ("d1", "d2")] == [6, 0]


async def test_cached_blocks_are_found_under_the_hashes_of_each_version() -> None:
    """Their block sizes differ, too."""
    size = 2 * BLOCK
    async with Bench([decode("d1"), decode("d3"), new(decode("d2"), block_size=size)]) as bench:
        mine, theirs = chain(root_hash("fp"), PROMPT, BLOCK), chain(root_hash("new"), PROMPT, size)
        for name, epoch, held in (("d1", 1, mine[:3]), ("d2", 2, theirs[:7])):
            await bench.store.publish(name, epoch, rows_of(held), [])
        found = await bench.cluster.reuse({"fp": mine, "new": theirs}, {})
        assert found == {"fp": {"d1": 3}, "new": {"d2": 7}}
        for _ in range(3):
            dispatch = bench.start(2)
            await collect(dispatch)
            assert dispatch.route.decode == "d2"
        assert [job.predicted[0] for job in bench["d2"].jobs] == [7 * size] * 3


async def test_a_stream_goes_on_at_its_own_version_only() -> None:
    async with Bench([prefill("p1"), decode("d1")]) as bench:
        at, _, tokens = await begun(bench)
        slow = {"rates": Rates(step_s=1.0, prefill_tokens_per_s=10.0)}
        await added(bench, new(prefill("p2")), new(decode("d2")), decode("d3", changes=slow))
        at.crash()
        assert await tokens == expected(PROMPT, MOST)
        assert not works(bench["p2"])
        assert not works(bench["d2"])
        assert bench["d3"].jobs


@pytest.mark.parametrize("last", ["its prefill node lives", "all are gone"])
async def test_a_stream_whose_version_is_gone_ends_with_an_error_that_says_so(last: str) -> None:
    async with Bench([prefill("p1"), decode("d1")], max_wait_s=0.3) as bench:
        at, dispatch, tokens = await begun(bench)
        assert dispatch.fork
        await added(bench, new(prefill("p2")), new(decode("d2")))
        if last == "all are gone":
            bench["p1"].crash()
            await bench.store.withdraw("p1", 1)
        at.crash()
        await bench.store.withdraw("d1", 1)
        with pytest.raises(NoNodes, match="nodes of other versions do not continue it") as ended:
            await tokens
        assert (ended.value.code, ended.value.status, ended.value.retryable) == ("no_nodes", 503, True)
        with pytest.raises(NoNodes, match="nodes of other versions do not continue it"):
            await collect(bench.start(4, fork_of=dispatch.fork))
        assert not works(bench["d2"])
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4), "new ones have nodes"


async def test_without_any_node_the_error_is_the_usual_one() -> None:
    async with Bench([decode("d1")], max_wait_s=0.3) as bench:
        at, _, tokens = await begun(bench)
        at.crash()
        with pytest.raises(NoNodes, match="has no decode node at present"):
            await tokens


async def test_before_the_first_token_any_version_may_take_over() -> None:
    failing = decode("d1", fail_attempts=["server_error"] * 20)
    async with Bench([failing, new(decode("d2"))]) as bench:
        outputs = await asyncio.gather(*(collect(bench.start(4)) for _ in range(4)))
        assert [ids(each) for each in outputs] == [expected(PROMPT, 4)] * 4
        assert bench["d1"].jobs
        assert len(bench["d2"].jobs) == 4


async def test_forks_stay_with_the_version_of_the_first() -> None:
    """Though nodes of the other one have nothing to do."""
    async with Bench([decode("d1"), new(decode("d2")), new(decode("d3"))]) as bench:
        at, leader, tokens = await begun(bench)
        assert leader.fork
        assert leader.fork.fingerprint == at.lease.fingerprint
        busy = Load(waiting_tokens=3_000, free_blocks=1000, total_blocks=1000)
        at.lease = replace(at.lease, load=busy)
        await bench.store.announce(at.lease)
        await until(lambda: bench.nodes.entries[at.node_id, at.epoch].lease.load == busy)
        forks = [bench.start(4, fork_of=leader.fork) for _ in range(6)]
        assert [ids(await collect(fork)) for fork in forks] == [expected(PROMPT, 4)] * 6
        others = [w for w in bench.workers.values() if w.lease.fingerprint != at.lease.fingerprint]
        assert not any(map(works, others))
        assert await tokens == expected(PROMPT, MOST)


async def test_a_hedge_may_go_to_the_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.router.dispatch.hedging, "MIN_LATE_S", 0.2)

    async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield SILENCE

    async with Bench([prefill("p1", prefill_script=hang), decode("d1")]) as bench:
        task = asyncio.create_task(collect(dispatch := bench.start(6)))
        await until(lambda: bool(bench["p1"].prefills))
        await added(bench, new(prefill("p2")), new(decode("d2")))
        assert ids(await task) == expected(PROMPT, 6)
        assert (bench.retries(), dispatch.route.prefill) == ({"hedge": 1}, "p2")
        assert {len(each) for each in fingerprints(bench.workers.values()).values()} == {1}
        assert dispatch.fork.fingerprint == "new"


async def test_a_prefill_node_is_tried_again_though_the_other_version_is_cheaper() -> None:
    calls = []

    async def fail_once(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        calls.append(request.job.attempt)
        if len(calls) == 1:
            await gate.wait()
            yield AttemptFailed(request.job.request_id, request.job.attempt, "server_error", "scripted")
            return
        async for answer in honest_prefill(worker, request):
            yield answer

    gate = asyncio.Event()
    slow = {"rates": Rates(prefill_tokens_per_s=100.0)}
    async with Bench([prefill("p1", prefill_script=fail_once, changes=slow), decode("d1", changes=slow)]) as bench:
        task = asyncio.create_task(collect(bench.start(6)))
        await until(lambda: bool(calls))
        await added(bench, new(prefill("p2")), new(decode("d2")))
        gate.set()
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.retries() == {"same_prefill": 1}
        assert (len(calls), works(bench["p2"])) == (2, 0)


async def test_a_request_too_long_for_one_version_goes_to_the_other() -> None:
    small = decode("d1", changes={"load": Load(free_blocks=10, total_blocks=10)})
    large = new(decode("d2"), load=Load(free_blocks=30, total_blocks=30))
    async with Bench([small, large]) as bench:
        for _ in range(4):
            await collect(bench.start(4))
        assert (len(small.jobs), len(large.jobs)) == (0, 4)
        with pytest.raises(ContextLengthExceeded, match=f"is {30 * BLOCK}$"):
            await collect(bench.start(4, range(1000)))


async def test_a_request_too_long_for_one_version_waits_for_the_node_of_the_other_that_failed() -> None:
    """It is not too long: the node is only avoided for a moment."""
    small = decode("d1", changes={"load": Load(free_blocks=10, total_blocks=10)})
    async with Bench([small, new(decode("d2", fail_attempts=["server_error"]))], max_wait_s=5.0) as bench:
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)
        assert [job.attempt for job in bench["d2"].jobs] == [0, 1]


async def test_a_request_that_fits_only_a_suspected_node_is_not_too_long() -> None:
    small = decode("d1", changes={"load": Load(free_blocks=10, total_blocks=10)})
    async with Bench([small, decode("d2")]) as bench:
        for _ in range(10):
            bench.nodes.breakers.node_failed(("d2", 1))
        assert bench.cluster.usable("decode") == {("d1", 1)}
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)


async def test_a_version_that_is_full_sends_no_request_away() -> None:
    full = decode("d1", changes={"load": Load(active_blocks=100, total_blocks=100, waiting_tokens=1400)})
    async with Bench([full, new(decode("d2"))]) as bench:
        for _ in range(4):
            await collect(bench.start(4))
        assert (len(full.jobs), len(bench["d2"].jobs)) == (0, 4)


async def test_prompts_alone_go_to_prefill_nodes_of_any_version() -> None:
    async with Bench([decode("d1"), new(prefill("p2"))]) as bench:
        dispatch = bench.start(1)
        await collect(dispatch)
        assert (dispatch.route.prefill, dispatch.route.decode) == ("p2", None)
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)
        assert len(bench["d1"].jobs) == 1


async def test_the_context_is_that_of_every_version_that_can_decode() -> None:
    short = new(prefill("p2"), max_model_len=64)
    async with Bench(
        [decode("d1", changes={"max_model_len": 512}), new(decode("d2"), max_model_len=256), short]
    ) as bench:
        assert bench.cluster.info().max_model_len == 64
        bench["d2"].lease = replace(bench["d2"].lease, state="draining")
        await bench.store.announce(bench["d2"].lease)
        await until(lambda: bench.cluster.info().max_model_len == 512)


async def test_decode_nodes_of_a_version_without_prefill_nodes_count_as_such() -> None:
    engine = new(decode("d2"), engine="vllm 0.32.0", max_num_seqs=8, rates=Rates(prefill_tokens_per_s=300.0))
    own = [prefill("p1", changes={"rates": Rates(1000.0)}), decode("d1", changes={"max_num_seqs": 4})]
    async with Bench([*own, engine]) as bench:
        told = bench.cluster.capacity()
        assert (told.sequences, told.prompt_per_s, told.decodes, told.prefills) == (12, 1300.0, 2, 2)


async def test_a_buddy_is_of_the_same_version() -> None:
    async with Bench([decode("d1"), new(decode("d2")), new(decode("d3")), prefill("p1")]) as bench:
        (d1, d2) = (bench[each].lease for each in ("d1", "d2"))
        assert {bench.cluster._buddy(None, d1).node_id for _ in range(32)} == {"p1"}
        assert {bench.cluster._buddy(None, d2).node_id for _ in range(32)} == {"d3"}
        assert bench.cluster._buddy(None, lease_of("d9", "decode", fingerprint="third")) is None


async def test_a_rolling_upgrade_under_load_loses_nothing_and_mixes_nothing() -> None:
    """One node after the other is replaced by one of the new version, while streams begin all the time."""
    async with Bench([prefill("p1"), prefill("p2"), decode("d1"), decode("d2")]) as bench:
        done, outputs, every = asyncio.Event(), [], list(bench.workers.values())

        async def clients() -> None:
            while not done.is_set():
                outputs.append(ids(await collect(bench.start(12))))

        load = [asyncio.create_task(clients()) for _ in range(4)]
        for old, role in (("p1", prefill), ("d1", decode), ("p2", prefill), ("d2", decode)):
            every.append(new(role(f"{old}-new")))
            await added(bench, every[-1])
            await asyncio.sleep(0.1)
            await withdrawn(bench, bench.workers.pop(old))
        served = works(bench["d2-new"])
        await until(lambda: works(bench["d2-new"]) > served)
        done.set()
        await asyncio.gather(*load)
        assert len(outputs) > 20
        assert all(each == expected(PROMPT, 12) for each in outputs)
        assert {group.fingerprint for group in bench.cluster.model.groups} == {"new"}
        seen = fingerprints(every)
        assert {len(each) for each in seen.values()} == {1}
        assert {*map(frozenset, seen.values())} == {frozenset({"fp"}), frozenset({"new"})}
