"""Nodes fail under a request: the client's tokens stay the same, each once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.protocol.errors import (
    Draining,
    GrantRefused,
    InvalidRequest,
    KvferryError,
    NodeLost,
    NoNodes,
    Overloaded,
)
from kvferry.protocol.messages import AttemptFailed, CancelRequest, PrefillRequest, Pulse
from tests.fake_workers import (
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
from tests.waiting import until


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
        assert bench.retries() == {"same_prefill": 1}
        jobs = [request.job for request in bench["p1"].prefills]
        assert [(job.attempt, job.failures) for job in jobs] == [(0, 0), (1, 1)]
        await until(lambda: len(bench["d1"].cancels) == 1)
        assert bench["d1"].cancels[0].attempt == 0


async def test_prefill_dies_before_its_first_token() -> None:
    async with Bench([prefill(prefill_script=crash_at_once), decode()]) as bench:
        dispatch = bench.start(6)
        assert ids(await collect(dispatch)) == expected(PROMPT, 6)
        assert bench.retries() == {"local_prefill": 1}
        assert dispatch.route.prefill is None


async def test_another_prefill_takes_over() -> None:
    async with Bench([prefill("p1", prefill_script=crash_at_once), prefill("p2"), decode()]) as bench:
        for _ in range(4):
            assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries()["another_prefill"] >= 1
        assert "local_prefill" not in bench.retries()


async def test_prefill_dies_after_its_first_token() -> None:
    async with Bench([prefill(prefill_script=crash_after_first), decode()]) as bench:
        dispatch = bench.start(6)
        assert ids(await collect(dispatch)) == expected(PROMPT, 6)
        assert bench.retries() == {"local_prefill": 1}
        job = bench["d1"].jobs[0]
        assert job.token_ids == PROMPT + tuple(expected(PROMPT, 1))
        assert job.prompt_len == len(PROMPT)
        assert str(dispatch.route).startswith("prefill=p1 decode=d1 reused=16")


async def test_prefill_that_dies_after_decode_took_over_changes_nothing() -> None:
    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield first_token(request.job)
        worker.peers["d1"].decode(request.job, 1)
        await asyncio.sleep(0.02)
        yield CRASH

    async with Bench([prefill(prefill_script=script), decode()]) as bench:
        assert ids(await collect(bench.start(20))) == expected(PROMPT, 20)
        assert bench.retries() == {}


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
        assert bench.retries() == {"local_prefill" if code == "server_error" else "another_pair": 1}


async def test_decode_reports_a_lost_ship() -> None:
    async with Bench([prefill(), decode(fail_attempts=["transfer_failed"])]) as bench:
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {"another_pair": 1}


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
        assert set(bench.retries()) == {"another_decode"}
        resumed = [job for job in bench["d2"].jobs if job.attempt == 1]
        assert resumed
        for job in resumed:
            assert job.token_ids[: len(PROMPT)] == PROMPT
            assert list(job.token_ids[len(PROMPT) :]) == expected(PROMPT, len(job.token_ids) - len(PROMPT))


async def test_a_stream_goes_on_where_its_prefix_is_even_if_the_index_does_not_know() -> None:
    async with Bench([prefill("p1"), prefill("p2"), decode("d1", crash_after=4), decode("d2")]) as bench:
        assert ids(await collect(bench.start(12))) == expected(PROMPT, 12)
        assert [request.job.attempt for request in bench["p1"].prefills] == [0, 1]
        assert not bench["p2"].prefills


async def test_only_decode_node_restarts_in_time() -> None:
    async with Bench([decode("d1", crash_after=3)], max_wait_s=5) as bench:
        task = asyncio.create_task(collect(bench.start(12)))
        await until(lambda: not bench.cluster.usable("decode"))
        await asyncio.sleep(0.1)
        await bench.add(decode("d1", epoch=2))
        assert ids(await task) == expected(PROMPT, 12)


async def test_requests_that_come_while_the_only_decode_node_restarts_wait_for_it() -> None:
    """Each had been a 503 at once."""
    async with Bench([decode("d1")], max_wait_s=5) as bench:
        bench["d1"].crash()
        await until(lambda: not bench.cluster.usable("decode"))
        tasks = [asyncio.create_task(collect(bench.start(6))) for _ in range(8)]
        await asyncio.sleep(0.3)
        await bench.add(decode("d1", epoch=2))
        assert [ids(await task) for task in tasks] == [expected(PROMPT, 6)] * 8
        assert bench.retries() == {}


async def test_who_waits_for_a_node_hears_in_time_that_none_comes() -> None:
    async with Bench([], max_wait_s=5) as bench:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoNodes) as caught:
            await collect(bench.start(6, deadline_s=0.6))
        assert 0.25 <= asyncio.get_running_loop().time() - began < 0.6
        assert caught.value.retry_after


async def test_only_decode_node_never_comes_back() -> None:
    async with Bench([decode(crash_after=3)], max_wait_s=0.3) as bench:
        with pytest.raises(NoNodes):
            await collect(bench.start(12))


async def test_silent_stream_is_a_lost_node() -> None:
    async with Bench([decode("d1")], silence_s=0.5, max_wait_s=10.0) as bench:
        task = asyncio.create_task(collect(bench.start(200)))
        await until(lambda: bench["d1"].running == 1)
        bench["d1"].frozen = True
        await until(lambda: bench.nodes.entries["d1", 1].suspected)
        await until(lambda: not bench.nodes.entries["d1", 1].linked)
        await bench.add(decode("d2"))
        assert ids(await task) == expected(PROMPT, 200)
        assert bench.retries() == {"another_decode": 1}


async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield SILENCE


@pytest.mark.parametrize("hanging", ["p1", "d1"])
async def test_a_node_whose_step_hangs_is_left_at_once(hanging: str) -> None:
    slow = prefill("p1", prefill_script=hang if hanging == "p1" else None)
    async with Bench([slow, decode("d1"), decode("d2")]) as bench:
        workers = [bench["p1"]] if hanging == "p1" else [bench["d1"], bench["d2"]]
        task = asyncio.create_task(collect(bench.start(200)))
        await until(lambda: any(worker.running or worker.prefills for worker in workers))
        victim = next(worker for worker in workers if worker.running or worker.prefills)
        victim.step_s, victim.pulse = 60.0, Pulse(engine_s=2.5, usual_s=0.01)
        began = time.monotonic()
        assert ids(await task) == expected(PROMPT, 200)
        assert time.monotonic() - began < 5
        assert bench.retries() == {"local_prefill" if hanging == "p1" else "another_decode": 1}
        assert not bench.nodes.entries[(victim.node_id, 1)].reachable
        victim.pulse = Pulse(engine_s=0.0, usual_s=0.01)
        await until(lambda: bench.nodes.entries[(victim.node_id, 1)].reachable)


async def test_a_node_whose_steps_are_long_as_a_rule_is_waited_for() -> None:
    async with Bench([decode("d1")]) as bench:
        bench["d1"].pulse = Pulse(engine_s=4.0, usual_s=0.5)
        await asyncio.sleep(0.5)
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert bench.retries() == {}


async def test_a_node_that_lost_its_lease_works_on_while_its_stream_flows() -> None:
    async with Bench([prefill("p1"), decode("d1")]) as bench:
        task = asyncio.create_task(collect(bench.start(400)))
        await until(lambda: bench["d1"].running)
        await bench.store.withdraw("p1", 1)
        await bench.store.withdraw("d1", 1)
        await asyncio.sleep(0.8)
        assert ids(await collect(bench.start(6))) == expected(PROMPT, 6)
        assert ids(await task) == expected(PROMPT, 400)
        assert bench.retries() == {}
        bench["p1"].crash()
        await until(lambda: ("p1", 1) not in bench.nodes.entries)


async def test_hanging_prefill_gets_its_share_of_the_deadline_only() -> None:
    async with Bench([prefill("p1", prefill_script=hang), decode()]) as bench:
        assert ids(await collect(bench.start(6, deadline_s=1.0))) == expected(PROMPT, 6)
        assert bench.retries() == {"local_prefill": 1}


async def test_decode_gives_up_an_attempt() -> None:
    async with Bench([decode("d1", fail_attempts=["server_error"]), decode("d2")]) as bench:
        results = [ids(await collect(bench.start(5))) for _ in range(2)]
        assert results == [expected(PROMPT, 5)] * 2
        assert bench.retries() == {"another_decode": 1}


async def test_refused_grants_wait_for_room() -> None:
    async with Bench([prefill(prefill_script=failing("grant_refused", times=2)), decode()], max_wait_s=3) as bench:
        assert ids(await collect(bench.start(5))) == expected(PROMPT, 5)
        assert bench.retries() == {"wait_for_room": 2}


async def test_room_that_never_comes_is_overload() -> None:
    async with Bench([decode(refusal=GrantRefused("full"))], max_wait_s=0.3) as bench:
        with pytest.raises(Overloaded) as caught:
            await collect(bench.start(5))
        assert caught.value.retry_after > 0


@pytest.mark.parametrize("refusal", [Overloaded("busy"), Draining("going")])
async def test_prefill_that_refuses_is_not_asked_again(refusal: KvferryError) -> None:
    async with Bench([prefill(refusal=refusal), decode()]) as bench:
        assert ids(await collect(bench.start(5))) == expected(PROMPT, 5)
        assert bench.retries() == {"local_prefill": 1}
        assert len(bench["p1"].prefills) == 1


async def test_what_no_other_attempt_can_help_is_raised_at_once() -> None:
    async with Bench([prefill(refusal=InvalidRequest("no", param="seed")), decode()]) as bench:
        with pytest.raises(InvalidRequest) as caught:
            await collect(bench.start(5))
        assert caught.value.param == "seed"
        assert bench.retries() == {}


async def test_attempts_are_bounded() -> None:
    async with Bench([decode(fail_attempts=["server_error"] * 99)], max_wait_s=30) as bench:
        with pytest.raises(KvferryError, match="scripted"):
            await collect(bench.start(5))
        assert len(bench["d1"].jobs) == 8


async def test_suspected_prefill_is_spared_for_a_while() -> None:
    async with Bench([prefill(prefill_script=crash_at_once), decode()]) as bench:
        await collect(bench.start(3))
        assert not bench.cluster.usable("prefill")
        dispatch = bench.start(3)
        await collect(dispatch)
        assert dispatch.route.prefill is None
        assert bench.retries() == {"local_prefill": 1}


def cannot_reach(*decodes: str) -> Any:
    """A prefill whose link to these decode nodes is broken."""

    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        job = request.job
        if request.target and request.target.node_id in decodes:
            await asyncio.sleep(0.02)
            yield AttemptFailed(job.request_id, job.attempt, "node_lost", "cannot reach it")
            return
        async for answer in honest_prefill(worker, request):
            yield answer

    return script


async def test_one_request_learns_for_all_that_a_pair_is_broken() -> None:
    """The decode node looks idle because nothing gets there: eight of eight requests had tried it first."""
    broken = cannot_reach("d1")
    async with Bench([prefill("p1", prefill_script=broken), decode("d1"), decode("d2")]) as bench:
        for _ in range(8):
            assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)
        assert bench.retries() == {"another_pair": 1}
        asked = [request.target.node_id for request in bench["p1"].prefills if request.target]
        assert asked.count("d1") == 1
        assert "p1" not in [node for node, _ in bench.nodes.breakers.open().nodes]


async def test_a_decode_node_that_no_prefill_node_reaches_computes_by_itself() -> None:
    broken = cannot_reach("d1")
    workers = [prefill("p1", prefill_script=broken), prefill("p2", prefill_script=broken), decode("d1")]
    async with Bench(workers) as bench:
        for _ in range(8):
            assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)
        assert bench.retries() == {"another_pair": 2}
        assert (None, ("d1", 1)) in bench.nodes.breakers.open().pairs


async def test_a_pair_that_works_again_is_used_again() -> None:
    async with Bench([prefill(prefill_script=failing("node_lost", times=1)), decode()]) as bench:
        await collect(bench.start(4))
        clock, ahead = bench.nodes.clock, 0.0
        bench.nodes.breakers._clock = lambda: clock() + ahead
        assert not (await route_of(bench)).prefill
        ahead = 2.1
        assert (await route_of(bench)).prefill == "p1"
        await until(lambda: not bench.nodes.breakers.any)


async def route_of(bench: Bench) -> Any:
    dispatch = bench.start(4)
    assert ids(await collect(dispatch)) == expected(PROMPT, 4)
    return dispatch.route


async def test_what_is_suspected_is_used_when_there_is_nothing_else() -> None:
    async with Bench([decode("d1")]) as bench:
        bench.nodes.breakers.node_failed(("d1", 1))
        assert ids(await collect(bench.start(4))) == expected(PROMPT, 4)
        assert not bench.nodes.breakers.any


async def test_lost_node_error_names_the_node() -> None:
    async with Bench([prefill(), decode()]) as bench:
        bench["p1"].crash()
        with pytest.raises(NodeLost, match="p1"):
            await bench.client.cancel(bench["p1"].lease, CancelRequest("r", 0))
