"""Patient requests give way to requests that would miss their targets, and go on later: no token is lost or changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.placement.rejections import TargetMissed
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.lease import Rates
from kvferry.protocol.messages import PrefillRequest
from tests.fake_workers import PROMPT, Bench, FakeWorker, collect, decode, expected, honest_prefill, ids, prefill
from tests.waiting import until

RATES = Rates(step_s=0.01, alone_s=0.010, stream_s=0.001)
ITL_S = 0.012
"""Three streams are so far apart, in seconds."""
MOST = 150


def tokens_of(bench: Bench, count: int, **how: Any) -> asyncio.Task[list[int]]:
    async def tokens() -> list[int]:
        return ids(await collect(bench.start(count, **how)))

    return asyncio.create_task(tokens())


def forgotten(bench: Bench) -> bool:
    books = bench.cluster.displacement
    return not (books._targets or books._patient or books._nodes or books._waiting)


async def busy(bench: Bench, count: int, most: int = MOST) -> list[asyncio.Task[list[int]]]:
    """So many patient streams under way, whose first tokens have arrived."""
    tasks = [tokens_of(bench, most, prompt=[number, *PROMPT], patient=True) for number in range(count)]
    streaming = [worker for worker in bench.workers.values() if worker.role == "decode"]
    await until(lambda: sum(made > 2 for worker in streaming for made in worker._made.values()) == count)
    return tasks


def node(name: str = "d1", **fields: Any) -> FakeWorker:
    return decode(name, changes={"rates": RATES, "max_num_seqs": 8}, **fields)


@pytest.mark.parametrize("workers", [lambda: [node()], lambda: [prefill(), node()]])
async def test_the_newest_patient_stream_gives_way_and_goes_on_behind_its_tokens(workers: Any) -> None:
    async with Bench(workers()) as bench:
        patient = await busy(bench, 3)
        urgent = tokens_of(bench, 20, itl_s=ITL_S)
        assert await urgent == expected(PROMPT, 20)
        assert not any(task.done() for task in patient)
        assert bench.retries() == {"displaced": 1}
        assert [await task for task in patient] == [expected([number, *PROMPT], MOST) for number in range(3)]
        later = [job for job in bench["d1"].jobs if job.attempt == 1]
        assert [job.token_ids[0] for job in later] == [2]
        assert len(later[0].token_ids) > len(PROMPT) + 1, "it began anew"
        assert bench.retries() == {"displaced": 1}
        assert forgotten(bench)


async def test_a_displaced_stream_waits_while_it_would_delay_the_one_with_the_target() -> None:
    async with Bench([node()]) as bench:
        patient = await busy(bench, 3)
        urgent = tokens_of(bench, MOST, itl_s=ITL_S)
        await until(lambda: bench.retries() == {"displaced": 1})
        await asyncio.sleep(0.1)
        assert bench["d1"].running == 3
        patient[0].cancel()
        await until(lambda: any(job.attempt == 1 for job in bench["d1"].jobs))
        assert not urgent.done(), "the place of one that left is free for it"
        assert await urgent == expected(PROMPT, MOST)
        assert [await task for task in patient[1:]] == [expected([number, *PROMPT], MOST) for number in (1, 2)]
    assert forgotten(bench)


async def test_without_patient_work_it_is_rejected_at_once() -> None:
    async with Bench([node()]) as bench:
        others = [tokens_of(bench, 60) for _ in range(3)]
        await until(lambda: bench["d1"].running == 3)
        with pytest.raises(TargetMissed) as caught:
            await collect(bench.start(20, itl_s=ITL_S))
        assert caught.value.retry_after
        assert [await task for task in others] == [expected(PROMPT, 60)] * 3
        assert bench.retries() == {}


async def test_nothing_gives_way_where_that_would_not_help() -> None:
    async with Bench([node()]) as bench:
        others = [tokens_of(bench, 60) for _ in range(4)]
        (patient,) = await busy_with(bench, others)
        with pytest.raises(TargetMissed):
            await collect(bench.start(20, itl_s=ITL_S))
        assert bench.retries() == {}
        await asyncio.gather(patient, *others)


async def busy_with(bench: Bench, others: list[asyncio.Task[list[int]]]) -> list[asyncio.Task[list[int]]]:
    await until(lambda: bench["d1"].running == len(others))
    patient = [tokens_of(bench, 60, patient=True)]
    await until(lambda: bench["d1"].running == len(others) + 1)
    return patient


async def test_where_the_fewest_must_give_way() -> None:
    async with Bench([node("d1"), node("d2")]) as bench:
        patient = await busy(bench, 7)
        crowded = max(bench.workers.values(), key=lambda worker: worker.running)
        assert crowded.running == 4
        urgent = tokens_of(bench, 20, itl_s=ITL_S)
        await until(lambda: len(crowded.cancels) + sum(len(w.cancels) for w in bench.workers.values()) > 0)
        assert not crowded.cancels
        assert await urgent == expected(PROMPT, 20)
        assert [await task for task in patient] == [expected([number, *PROMPT], MOST) for number in range(7)]
    assert forgotten(bench)


async def test_a_new_patient_request_waits_behind_the_displaced_ones() -> None:
    async with Bench([node()]) as bench:
        urgent = [tokens_of(bench, 60, itl_s=ITL_S, prompt=[900 + number, *PROMPT]) for number in range(3)]
        await until(lambda: bench["d1"].running == 3)
        patient = [tokens_of(bench, 8, prompt=[number, *PROMPT], patient=True) for number in range(5)]
        await until(lambda: len(bench.cluster.displacement._waiting) == 5)
        assert [await task for task in urgent] == [expected([900 + number, *PROMPT], 60) for number in range(3)]
        assert [await task for task in patient] == [expected([number, *PROMPT], 8) for number in range(5)]
        assert bench.retries() == {}
    assert forgotten(bench)


async def test_prompts_give_way_to_a_first_token_that_would_come_too_late() -> None:
    held = asyncio.Event()

    async def slow(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        if request.job.token_ids[0] < 10 and request.job.attempt == 0:
            await held.wait()
        async for message in honest_prefill(worker, request):
            yield message

    computes, decodes = ({"rates": Rates(prefill_tokens_per_s=rate)} for rate in (100.0, 1.0))
    async with Bench([prefill(prefill_script=slow, changes=computes), decode(changes=decodes)]) as bench:
        patient = [tokens_of(bench, 8, prompt=[number, *PROMPT], patient=True) for number in range(3)]
        await until(lambda: len(bench["p1"].prefills) == 3)
        with pytest.raises(Overloaded):
            await collect(bench.start(4, first_s=0.1))
        assert bench.retries() == {}, "its own prompt takes longer"
        assert await tokens_of(bench, 4, first_s=1.5) == expected(PROMPT, 4)
        assert bench.retries() == {"displaced": 2}
        held.set()
        assert [await task for task in patient] == [expected([number, *PROMPT], 8) for number in range(3)]
        assert [job.job.token_ids[0] for job in bench["p1"].prefills if job.job.attempt] in ([1, 2], [2, 1])
    assert forgotten(bench)


async def test_whoever_waits_until_its_deadline_may_come_again() -> None:
    async with Bench([node()]) as bench:
        urgent = [tokens_of(bench, MOST, itl_s=ITL_S) for _ in range(3)]
        await until(lambda: bench["d1"].running == 3)
        with pytest.raises(Overloaded, match="targets"):
            await collect(bench.start(8, patient=True, deadline_s=0.2))
        leaving = tokens_of(bench, 8, patient=True)
        await until(lambda: len(bench.cluster.displacement._waiting) == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: not bench.cluster.displacement._waiting)
        assert [await task for task in urgent] == [expected(PROMPT, MOST)] * 3
    assert forgotten(bench)
