"""Nodes fail under a request: the client's tokens stay the same, each once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_workers import (
    CRASH,
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    first_token,
    honest_prefill,
    ids,
    prefill,
)
from waiting import until

from protocol.errors import (
    Draining,
    GrantRefused,
    InvalidRequest,
    KvferryError,
    NodeLost,
    NoNodes,
    Overloaded,
)
from protocol.messages import AttemptFailed, CancelRequest, PrefillRequest


async def crash_at_once(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield CRASH


async def crash_after_first(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield first_token(request.job)
    await asyncio.sleep(0.02)
    yield CRASH


def failing(code: str, *, after_first: bool = False, times: int = 99) -> Any:
    """A prefill that gives up `times` attempts with an error of this code."""
    left = [times]

    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        if left[0] == 0:
            async for answer in honest_prefill(worker, request):
                yield answer
            return
        left[0] -= 1
        if after_first:
            yield first_token(request.job)
        yield AttemptFailed(request.job.request_id, request.job.attempt, code, "scripted")

    return script


async def test_same_prefill_again_before_any_byte() -> None:
    async with Bench([prefill(prefill_script=failing("server_error", times=1)), decode()]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.rungs() == {"same_prefill": 1}
        assert [request.job.attempt for request in bench["p1"].prefills] == [0, 1]
        await until(lambda: len(bench["d1"].cancels) == 1)
        assert bench["d1"].cancels[0].attempt == 0


async def test_prefill_dies_before_its_first_token() -> None:
    async with Bench([prefill(prefill_script=crash_at_once), decode()]) as bench:
        journey = bench.start(6)
        assert ids(await collect(journey)) == expected(PROMPT, 6)
        assert bench.rungs() == {"same_prefill": 1, "local_prefill": 1}
        assert journey.route.prefill is None


async def test_another_prefill_takes_over() -> None:
    async with Bench([prefill("p1", prefill_script=crash_at_once), prefill("p2"), decode()]) as bench:
        for _ in range(4):
            assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.rungs()["another_prefill"] >= 1
        assert "local_prefill" not in bench.rungs()


async def test_prefill_dies_after_its_first_token() -> None:
    async with Bench([prefill(prefill_script=crash_after_first), decode()]) as bench:
        journey = bench.start(6)
        assert ids(await collect(journey)) == expected(PROMPT, 6)
        assert bench.rungs() == {"local_prefill": 1}
        job = bench["d1"].jobs[0]
        assert job.token_ids == PROMPT + tuple(expected(PROMPT, 1))
        assert job.prompt_len == len(PROMPT)
        assert str(journey.route).startswith("prefill=p1 decode=d1 reused=16")


async def test_prefill_that_dies_after_decode_took_over_changes_nothing() -> None:
    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield first_token(request.job)
        worker.peers["d1"].decode(request.job, 1)
        await asyncio.sleep(0.02)
        yield CRASH

    async with Bench([prefill(prefill_script=script), decode()]) as bench:
        assert ids(await collect(bench.start(20))) == expected(PROMPT, 20)
        assert bench.rungs() == {}


async def test_first_token_lost_although_decode_runs() -> None:
    """The commit reached decode, the first token never reached the router: start over, older tokens are ignored."""

    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        worker.peers["d1"].decode(request.job, 1)
        await asyncio.sleep(0.02)
        yield CRASH

    async with Bench([prefill(prefill_script=script), decode()]) as bench:
        assert ids(await collect(bench.start(12))) == expected(PROMPT, 12)


@pytest.mark.parametrize("code", ["transfer_failed", "node_lost", "incompatible", "server_error"])
async def test_ship_fails_after_the_first_token(code: str) -> None:
    async with Bench([prefill(prefill_script=failing(code, after_first=True)), decode()]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.rungs() == {"local_prefill": 1}


async def test_decode_reports_a_lost_ship() -> None:
    async with Bench([prefill(), decode(fail_attempts=["transfer_failed"])]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.rungs() == {"local_prefill": 1}


async def test_prefill_answer_that_just_ends() -> None:
    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield first_token(request.job)

    async with Bench([prefill(prefill_script=script), decode()]) as bench:
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)


@pytest.mark.parametrize("crash_after", [1, 3, 9])
@pytest.mark.parametrize("with_prefill", [True, False])
async def test_decode_dies_while_tokens_flow(crash_after: int, with_prefill: bool) -> None:
    workers = [decode("d1", crash_after=crash_after), decode("d2")] + [prefill()] * with_prefill
    async with Bench(workers) as bench:
        outputs = await asyncio.gather(*(collect(bench.start(16)) for _ in range(4)))
        for output in outputs:
            assert ids(output) == expected(PROMPT, 16)
            assert output[-1].finish_reason == "length"
        assert set(bench.rungs()) == {"another_decode"}
        resumed = [job for job in bench["d2"].jobs if job.attempt == 1]
        assert resumed
        for job in resumed:
            assert job.token_ids[: len(PROMPT)] == PROMPT
            assert list(job.token_ids[len(PROMPT) :]) == expected(PROMPT, len(job.token_ids) - len(PROMPT))


async def test_only_decode_node_restarts_in_time() -> None:
    async with Bench([decode("d1", crash_after=3)], patience_s=5) as bench:
        task = asyncio.create_task(collect(bench.start(12)))
        await until(lambda: not bench.cluster.able("decode"))
        await asyncio.sleep(0.1)
        await bench.add(decode("d1", epoch=2))
        assert ids(await task) == expected(PROMPT, 12)


async def test_only_decode_node_never_comes_back() -> None:
    async with Bench([decode(crash_after=3)], patience_s=0.3) as bench:
        with pytest.raises(NoNodes):
            await collect(bench.start(12))


async def test_silent_stream_is_a_lost_node() -> None:
    async with Bench([decode("d1"), decode("d2")], silence_s=0.5) as bench:
        task = asyncio.create_task(collect(bench.start(200)))
        await until(lambda: bench["d1"].running + bench["d2"].running == 1)
        victim = "d1" if bench["d1"].running else "d2"
        bench[victim].frozen = True
        assert ids(await task) == expected(PROMPT, 200)
        assert bench.rungs() == {"another_decode": 1}


async def test_hanging_prefill_whose_lease_ends() -> None:
    async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield SILENCE

    async with Bench([prefill(prefill_script=hang), decode()]) as bench:
        task = asyncio.create_task(collect(bench.start(6)))
        await until(lambda: len(bench["p1"].prefills) == 1)
        await bench.store.withdraw("p1", 1)
        assert ids(await task) == expected(PROMPT, 6)
        assert bench.rungs() == {"local_prefill": 1}


async def test_hanging_prefill_gets_its_share_of_the_deadline_only() -> None:
    async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield SILENCE

    async with Bench([prefill("p1", prefill_script=hang), decode()]) as bench:
        assert ids(await collect(bench.start(6, deadline_s=1.0))) == expected(PROMPT, 6)
        assert bench.rungs() == {"same_prefill": 1, "local_prefill": 1}


async def test_decode_gives_up_an_attempt() -> None:
    async with Bench([decode("d1", fail_attempts=["server_error"]), decode("d2")]) as bench:
        results = [ids(await collect(bench.start(5))) for _ in range(2)]
        assert results == [expected(PROMPT, 5)] * 2
        assert bench.rungs() == {"another_decode": 1}


async def test_refused_grants_wait_for_room() -> None:
    async with Bench([prefill(prefill_script=failing("grant_refused", times=2)), decode()], patience_s=3) as bench:
        assert ids(await collect(bench.start(5))) == expected(PROMPT, 5)
        assert bench.rungs() == {"wait_for_room": 2}


async def test_room_that_never_comes_is_overload() -> None:
    async with Bench([decode(refusal=GrantRefused("full"))], patience_s=0.3) as bench:
        with pytest.raises(Overloaded) as caught:
            await collect(bench.start(5))
        assert caught.value.retry_after > 0


@pytest.mark.parametrize("refusal", [Overloaded("busy"), Draining("going")])
async def test_prefill_that_refuses_is_not_asked_again(refusal: KvferryError) -> None:
    async with Bench([prefill(refusal=refusal), decode()]) as bench:
        assert ids(await collect(bench.start(5))) == expected(PROMPT, 5)
        assert bench.rungs() == {"local_prefill": 1}
        assert len(bench["p1"].prefills) == 1


async def test_what_no_other_attempt_can_help_is_raised_at_once() -> None:
    async with Bench([prefill(refusal=InvalidRequest("no", param="seed")), decode()]) as bench:
        with pytest.raises(InvalidRequest) as caught:
            await collect(bench.start(5))
        assert caught.value.param == "seed"
        assert bench.rungs() == {}


async def test_attempts_are_bounded() -> None:
    async with Bench([decode(fail_attempts=["server_error"] * 99)], patience_s=30) as bench:
        with pytest.raises(KvferryError, match="scripted"):
            await collect(bench.start(5))
        assert len(bench["d1"].jobs) == 8


async def test_suspected_prefill_is_spared_for_a_while() -> None:
    async with Bench([prefill(prefill_script=crash_at_once), decode()]) as bench:
        await collect(bench.start(3))
        assert not bench.cluster.able("prefill")
        journey = bench.start(3)
        await collect(journey)
        assert journey.route.prefill is None
        assert bench.rungs() == {"same_prefill": 1, "local_prefill": 1}


async def test_lost_node_error_names_the_node() -> None:
    async with Bench([prefill(), decode()]) as bench:
        bench["p1"].crash()
        with pytest.raises(NodeLost, match="p1"):
            await bench.client.cancel(bench["p1"].lease, CancelRequest("r", 0))
