"""Work that generates nothing takes the same dispatch: placed on prefill, retried on the ladder, cancelled, timed."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.protocol.errors import Cancelled, DeadlineExceeded
from kvferry.protocol.messages import FirstToken, Job, PrefillRequest, StepFrame, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.work import Embed
from kvferry.router.dispatch.dispatch import RequestDispatch
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.request_context import RequestContext
from tests.fake_workers import CRASH, PROMPT, SILENCE, Bench, FakeWorker, collect, decode, prefill
from tests.waiting import until

VECTOR = struct.pack("<3f", 1.0, 2.0, 3.0)


def answer(job: Job, **reuse: Any) -> TokenDelta:
    account = Reuse(len(job.token_ids), computed=len(job.token_ids) - sum(reuse.values()), **reuse)
    return TokenDelta(job.request_id, job.attempt, 0, (), finish_reason="stop", reuse=account, vector=VECTOR)


async def reads(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    assert request.target is None
    yield FirstToken(answer(request.job, reused_prefill=16), 0.001, 0.002)


async def crashes(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield CRASH


async def hangs(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield SILENCE


class ReadingDecode(FakeWorker):
    """A decode node that embeds."""

    def decode(self, job: Job, first_index: int, reuse: Reuse | None = None) -> None:
        self.jobs.append(job)
        self._queues[job.router_id].put_nowait(StepFrame((answer(job),)))


class SilentDecode(FakeWorker):
    """A decode node that never answers."""

    def decode(self, job: Job, first_index: int, reuse: Reuse | None = None) -> None:
        self.jobs.append(job)


def start(bench: Bench, work: Embed = Embed(), deadline_s: float = 60.0) -> RequestDispatch:  # noqa: B008 - frozen
    call = RequestContext("r", arrival=(now := time.monotonic()), deadline=now + deadline_s)
    return bench.cluster.start(RequestSpec(call, "r", PROMPT, work))


async def test_a_prefill_node_does_it_alone() -> None:
    async with Bench([prefill(prefill_script=reads), decode()]) as bench:
        dispatch = start(bench)
        (output,) = await collect(dispatch)
        assert (output.vector, output.token_ids, output.finish_reason) == (VECTOR, (), "stop")
        assert str(dispatch.route) == "prefill=p1 decode=none reused=16 computed=48"
        assert bench["p1"].prefills[0].job.work == Embed()
        assert not bench["d1"].jobs


async def test_a_decode_node_does_it_where_there_is_no_prefill_node() -> None:
    async with Bench([ReadingDecode("d1", "decode")]) as bench:
        dispatch = start(bench, Embed("mean", False, 3))
        (output,) = await collect(dispatch)
        assert output.vector == VECTOR
        assert str(dispatch.route) == "prefill=none decode=d1 reused=0 computed=64"


@pytest.mark.parametrize("others", [[prefill("p2", prefill_script=reads)], []])
async def test_the_ladder_when_its_node_dies(others: list[FakeWorker]) -> None:
    async with Bench([prefill(prefill_script=crashes), ReadingDecode("d1", "decode")]) as bench:
        for other in others:
            other = prefill("p2", prefill_script=reads)
            await bench.add(other)
            await until(lambda: len(bench.cluster.usable("prefill")) == 2)
        outputs = [(await collect(start(bench)))[0].vector for _ in range(3)]
        assert outputs == [VECTOR] * 3
        assert bench.retries()


async def test_a_deadline_ends_it() -> None:
    async with Bench([prefill(prefill_script=hangs), SilentDecode("d1", "decode")]) as bench:
        with pytest.raises(DeadlineExceeded):
            await collect(start(bench, deadline_s=0.3))
        await until(lambda: bench["p1"].cancels)


async def test_a_cancel_reaches_its_node() -> None:
    async with Bench([prefill(prefill_script=hangs), decode()]) as bench:
        dispatch = start(bench)
        running = asyncio.create_task(collect(dispatch))
        await until(lambda: bench["p1"].prefills)
        await dispatch.cancel()
        with pytest.raises(Cancelled):
            await running
        await until(lambda: bench["p1"].cancels)
