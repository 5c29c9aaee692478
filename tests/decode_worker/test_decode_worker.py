"""The decode role over HTTP: local prefill, standing streams, cancels, drains; the books balance after each."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from kvferry.engine.events import Generated
from kvferry.protocol.errors import NodeLost
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from tests.toy import VOCAB, expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, worker


def prompt(length: int = 40, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """Of one decode node."""
    async with worker("decode", make_engine()) as decode:
        running = Router(None, decode, "router")
        await running.connect()
        yield running
        await running.close()


async def complete(router: Router, job: Job) -> list[TokenDelta]:
    assert (await router.generate(job)).status_code == 202
    await until(lambda: router.finished(job.request_id))
    assert router.tokens(job.request_id) == expected(list(job.token_ids), job.params.max_tokens)
    return [delta for delta in router.deltas if delta.request_id == job.request_id]


async def test_a_prompt_is_computed_here_and_reused(router: Router) -> None:
    first = (await complete(router, make_job("a", prompt())))[0]
    assert first.reuse is not None
    assert first.reuse.computed == 40
    first, *others = await complete(router, make_job("b", [*prompt(), 3]))
    assert first.reuse is not None
    assert (first.reuse.reused_decode, first.reuse.computed) == (40, 1)
    assert all(delta.reuse is None for delta in others)
    await router.decode.settle()


async def test_an_account_that_does_not_add_up_is_counted_and_its_token_delivered(router: Router) -> None:
    delta = TokenDelta("a", 0, 0, (7,), reuse=Reuse(40, reused_decode=16, computed=20))
    router.decode.service.to_routers([Generated(("a", 0), "router", delta)])
    await until(lambda: router.deltas)
    assert router.deltas == [delta]
    assert router.decode.node.metrics.account_violations._value.get() == 1


async def test_a_step_is_one_frame(router: Router) -> None:
    router.decode.pause_at(1)
    jobs = [make_job(f"r{i}", prompt(4, i)) for i in range(4)]
    await router.generate(jobs[0])
    await until(lambda: router.decode.paused)
    for job in jobs[1:]:
        await router.generate(job)
    frames = router.frames
    router.decode.resume()
    await until(lambda: all(router.finished(job.request_id) for job in jobs))
    assert router.frames - frames <= 7 + 8 + 1
    await router.decode.settle()


async def test_the_same_attempt_twice_runs_once(router: Router) -> None:
    router.decode.pause_at(0)
    job = make_job("a", prompt())
    for _ in range(2):
        assert (await router.generate(job)).status_code == 202
    router.decode.resume()
    await complete(router, make_job("b", prompt(seed=1)))
    assert router.tokens("a") == expected(prompt(), 8)
    await router.decode.settle()


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_cancel(router: Router, steps: int) -> None:
    router.decode.pause_at(steps)
    job = make_job("a", prompt(), max_tokens=50)
    await router.generate(job)
    await until(lambda: router.decode.paused)
    await router.cancel(job, router.decode)
    await router.decode.settle()
    assert len(router.tokens("a")) <= 3
    await until(lambda: router.failed)
    assert [(f.request_id, f.code) for f in router.failed] == [("a", "cancelled")]


async def test_a_cancel_that_overtakes_its_request_still_holds(router: Router) -> None:
    job = make_job("a", prompt())
    await router.cancel(job, router.decode)
    await router.generate(job)
    await until(lambda: router.failed)
    assert router.failed[0].code == "cancelled"
    await complete(router, make_job("a", prompt(), attempt=1))
    await router.decode.settle()


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_the_router_goes_away(router: Router, steps: int) -> None:
    router.decode.pause_at(steps)
    await router.generate(make_job("a", prompt(), max_tokens=100))
    await until(lambda: router.decode.paused)
    await router.hang_up()
    await until(lambda: not router.decode.loaded._streams._routers)
    router.decode.resume()
    await router.decode.settle()
    assert router.decode.node.metrics.attempts["done"]._value.get() == 0


async def test_a_router_without_a_stream_gets_nothing_computed(router: Router) -> None:
    await router.hang_up()
    await until(lambda: not router.decode.loaded._streams._routers)
    await router.generate(make_job("a", prompt(), max_tokens=100))
    await router.decode.settle()
    assert router.decode.node.metrics.attempts["done"]._value.get() == 0


async def test_routers_are_kept_apart(router: Router) -> None:
    other = Router(None, router.decode, "other")
    await other.connect()
    router.decode.pause_at(4)
    await router.generate(make_job("mine", prompt()))
    job = make_job("theirs", prompt(seed=1))
    await other.generate(Job("theirs", 0, job.token_ids, job.prompt_len, job.work, "other"))
    await until(lambda: router.decode.paused)
    await router.hang_up()
    router.decode.resume()
    await until(lambda: other.finished("theirs"))
    assert other.tokens("theirs") == expected(prompt(seed=1), 8)
    assert not other.tokens("mine")
    await other.close()
    await router.decode.settle()


async def test_what_cannot_be_taken_is_told_on_the_stream(router: Router) -> None:
    await router.generate(make_job("long", prompt(300)))
    await router.generate(make_job("ids", [VOCAB]))
    await until(lambda: len(router.failed) == 2)
    assert [f.code for f in router.failed] == ["context_length_exceeded", "invalid_request_error"]
    await router.decode.settle()


async def test_a_step_that_breaks_fails_its_requests(router: Router) -> None:
    run, left = router.decode.engine.runner.run, [1, 2]

    def broken(*step: object) -> object:
        left.pop()
        if not left:
            router.decode.engine.runner.run = run  # type: ignore[method-assign]
        raise NodeLost("the device is gone")

    router.decode.engine.runner.run = broken  # type: ignore[method-assign, assignment]
    await router.generate(make_job("a", prompt()))
    await until(lambda: router.failed)
    assert (router.failed[0].code, router.failed[0].message) == ("node_lost", "the device is gone")
    await complete(router, make_job("b", prompt()))
    await router.decode.settle()


async def test_a_drain_lets_requests_finish_to_the_last_token(router: Router) -> None:
    router.decode.pause_at(2)
    await router.generate(make_job("a", prompt()))
    await until(lambda: router.decode.paused)
    router.decode.stop.handle(signal.SIGTERM)
    await until(lambda: router.decode.node.state == "draining")
    assert (await router.generate(make_job("b", prompt()))).status_code == 503
    async with httpx.AsyncClient(trust_env=False) as client:
        scraped = await client.get(f"{router.decode.node.address.url}/metrics")
    assert 'kvferry_requests_running{model_name="toy",role="decode"} 1.0' in scraped.text
    router.decode.resume()
    await asyncio.wait_for(asyncio.shield(router.decode.run), 5)
    await until(lambda: router.finished("a"))
    assert router.tokens("a") == expected(prompt(), 8)


async def test_a_drain_waits_for_what_was_only_just_accepted(router: Router) -> None:
    with router.decode.frozen_engine():
        await router.generate(make_job("a", prompt()))
        router.decode.stop.handle(signal.SIGTERM)
        await until(lambda: router.decode.node.state == "draining")
        await asyncio.sleep(0.15)
    await asyncio.wait_for(asyncio.shield(router.decode.run), 5)
    await until(lambda: router.finished("a"))
    assert router.tokens("a") == expected(prompt(), 8)


async def test_a_hurried_end_takes_seconds_with_requests_running(router: Router) -> None:
    await router.generate(make_job("a", prompt(), max_tokens=200))
    await until(lambda: router.tokens("a"))
    began = time.monotonic()
    router.decode.stop.handle(signal.SIGINT)
    await asyncio.wait_for(asyncio.shield(router.decode.run), 5)
    assert time.monotonic() - began < 3


async def test_a_message_of_the_wrong_kind_is_refused(router: Router) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for path in ("generate", "cancel"):
            response = await client.post(f"{router.decode.node.address.url}/attempts/{path}", content=b"\x01")
            assert response.status_code == 400
