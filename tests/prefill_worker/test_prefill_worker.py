"""The prefill role against a real decode node: every end of an attempt, from every phase, leaves both nodes clean."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import signal
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.ledger import Ledger
from kvferry.protocol.messages import AttemptFailed, FirstToken, Job, ShipDone
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.work import Embed
from tests.ledger_books import blocks
from tests.toy import VOCAB, HeldModel, expected, make_engine, make_job, toy_next
from tests.waiting import until, wait_for
from tests.worker_pair import Answer, Router, pair, worker

LENGTH = 40
"""Three steps of prefill."""


def prompt(length: int = LENGTH, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with pair() as running:
        yield running


async def settle(router: Router) -> None:
    await router.prefill.settle()
    await router.decode.settle()


def ships(router: Router, outcome: str) -> tuple[float, float]:
    """Ships that ended so, as prefill and decode count them."""
    prefill, decode = (worker.node.metrics.ships for worker in (router.prefill, router.decode))
    return prefill[outcome]._value.get(), decode[outcome]._value.get()


async def complete(router: Router, job: Job) -> tuple[FirstToken, ShipDone]:
    """Run a job through both nodes; its tokens must be the model's."""
    answer = router.post_prefill(job, router.decode.target)
    first, done = await answer.ended()
    await until(lambda: router.finished(job.request_id))
    made = [*first.delta.token_ids, *router.tokens(job.request_id)]
    assert made == expected(list(job.token_ids), job.params.max_tokens)
    return first, done


async def test_a_prompt_is_computed_shipped_and_continued(router: Router) -> None:
    first, done = await complete(router, make_job("a", prompt()))
    assert first.delta.reuse is not None
    assert (first.delta.reuse.computed, first.delta.reuse.cached_len) == (LENGTH, 0)
    assert (done.blocks, done.bytes) == (10, 10 * 32)
    assert 0 <= done.exposed_s <= done.ship_s
    first, done = await complete(router, make_job("b", [*prompt(), 1, 2]))
    assert first.delta.reuse is not None
    assert (first.delta.reuse.computed, first.delta.reuse.reused_prefill) == (2, LENGTH)
    assert done.blocks == 1
    await settle(router)
    received = router.decode.node.metrics.ship_bytes._value.get()
    assert received == router.prefill.node.metrics.ship_bytes._value.get() == 11 * 32


async def test_many_at_once(router: Router) -> None:
    await asyncio.gather(*(complete(router, make_job(f"r{i}", prompt(3 + i, i))) for i in range(12)))
    await settle(router)


async def test_prefill_only(router: Router) -> None:
    (first,) = await router.post_prefill(make_job("a", prompt(), max_tokens=1, prompt_logprobs=1)).ended()
    assert list(first.delta.token_ids) == expected(prompt(), 1)
    assert first.delta.finish_reason == "length"
    assert len(first.delta.prompt_logprobs) == LENGTH
    await settle(router)


async def test_a_request_that_ends_with_its_first_token_gives_its_grant_back(router: Router) -> None:
    (stop,) = expected(prompt(), 1)
    (first,) = await router.post_prefill(make_job("a", prompt(), stop_token_ids=(stop,)), router.decode.target).ended()
    assert (first.delta.finish_reason, first.delta.stop_token) == ("stop", stop)
    await settle(router)
    assert router.tokens("a") == []
    assert ships(router, "aborted") == (1, 1)
    assert ships(router, "failed") == (0, 0)


async def test_prompt_logprobs_go_to_the_router_and_not_over_the_link(router: Router) -> None:
    committed = []
    commit = router.prefill.service._ships.sender.commit
    router.prefill.service._ships.sender.commit = lambda transfer, first: (
        committed.append(first),
        commit(transfer, first),
    )
    first, _ = await complete(router, make_job("a", prompt(), prompt_logprobs=3, logprobs=1))
    assert len(first.delta.prompt_logprobs) == LENGTH
    assert committed[0].prompt_logprobs is None
    await settle(router)


async def offered(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """The decode node has not answered the offer."""
    stack.enter_context(router.decode.frozen_engine())
    answer = router.post_prefill(job, router.decode.target)
    await until(lambda: router.decode.service._grants.receiver.transfers)
    return answer


async def waiting_for_room(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """The reservation is queued behind a full pool."""
    router.decode.engine.pool.acquire("hog", "test", [], 60)
    loop = router.decode.loaded.engine
    books = cast("Ledger", router.decode.engine.pool.holds)
    stack.callback(loop.submit, lambda e: e.pool.release("hog", "test", blocks(books, "hog", "test")))
    answer = router.post_prefill(job, router.decode.target)
    await until(lambda: router.decode.loaded.engine.load.waiting_requests)
    return answer


async def granted(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """The prefill engine has not looked at the granted request."""
    stack.enter_context(router.prefill.frozen_engine())
    answer = router.post_prefill(job, router.decode.target)
    ships = router.prefill.service._ships.sender.transfers._all
    await until(lambda: any(ship.blocks for ship in ships.values()))
    return answer


async def computing(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """Two of three chunks are computed and shipped."""
    router.prefill.pause_at(2)
    stack.callback(router.prefill.resume)
    answer = router.post_prefill(job, router.decode.target)
    await until(lambda: router.prefill.paused)
    return answer


async def committing(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """All is computed, the first token is out, decode does not read its link."""
    answer = await computing(router, stack, job)
    stack.enter_context(router.decode.frozen_link())
    router.prefill.resume()
    await until(lambda: answer.messages)
    return answer


async def landed(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """Decode acknowledged the commit; its engine has not looked at it."""
    answer = await computing(router, stack, job)
    stack.enter_context(router.decode.frozen_engine())
    router.prefill.resume()
    await answer.ended()
    return answer


async def generating(router: Router, stack: contextlib.ExitStack, job: Job) -> Answer:
    """Decode is two tokens further."""
    router.decode.pause_at(2)
    stack.callback(router.decode.resume)
    answer = router.post_prefill(job, router.decode.target)
    await until(lambda: router.decode.paused)
    await answer.ended()
    return answer


PHASES = [offered, waiting_for_room, granted, computing, committing, landed, generating]


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel(router: Router, phase: Callable[..., AsyncIterator[Answer]]) -> None:
    job = make_job("a", prompt(), max_tokens=50)
    with contextlib.ExitStack() as stack:
        answer = await phase(router, stack, job)  # type: ignore[misc]
        await router.cancel(job)
        messages = await answer.ended()
    kinds = [type(m) for m in messages]
    if phase in (landed, generating):
        assert kinds == [FirstToken, ShipDone]
    else:
        assert kinds[-1] is AttemptFailed
        assert messages[-1].code == "cancelled"
    await settle(router)
    assert ships(router, "failed") == (0, 0)
    assert len(router.tokens("a")) <= 3
    await complete(router, make_job("next", prompt(seed=1)))
    await settle(router)


@pytest.mark.parametrize("how", ["cancel", "hang up"])
async def test_a_step_ends_early_when_its_request_is_cancelled(router: Router, how: str) -> None:
    """The next one need not wait for what nobody wants."""
    held = router.prefill.engine.runner.model = HeldModel()
    job = make_job("a", prompt())
    answer = router.post_prefill(job, router.decode.target)
    await until(held.begun.is_set)
    await (router.cancel(job) if how == "cancel" else answer.hang_up())
    await settle(router)
    held.release()
    await complete(router, make_job("b", prompt()))
    await settle(router)


async def test_a_step_of_decode_ends_early_when_its_request_is_cancelled(router: Router) -> None:
    held = router.decode.engine.runner.model = HeldModel()
    job = make_job("a", prompt())
    await router.generate(job)
    await until(held.begun.is_set)
    await router.cancel(job, router.decode)
    await until(lambda: router.failed)
    assert router.failed[0].code == "cancelled"
    held.release()
    await complete(router, make_job("b", prompt()))
    await settle(router)


@pytest.mark.parametrize("phase", PHASES)
async def test_the_router_goes_away(router: Router, phase: Callable[..., AsyncIterator[Answer]]) -> None:
    job = make_job("a", prompt(), max_tokens=50)
    with contextlib.ExitStack() as stack:
        answer = await phase(router, stack, job)  # type: ignore[misc]
        await answer.hang_up()
        await router.hang_up()
        await asyncio.sleep(0.02)
    await settle(router)
    await router.connect()
    await complete(router, make_job("next", prompt(seed=1)))
    await settle(router)


async def test_what_runs_for_a_frozen_router_is_given_up(router: Router) -> None:
    with contextlib.ExitStack() as stack:
        answer = await computing(router, stack, make_job("a", prompt(), max_tokens=50))
        router.prefill.service.router_lost("another")
        assert not answer.messages
        router.prefill.service.router_lost(router.name)
        (failure,) = await answer.ended()
        assert (failure.request_id, failure.code) == ("a", "cancelled")
    await settle(router)


@pytest.mark.parametrize("phase", [offered, waiting_for_room, granted, computing, landed, generating])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_the_peer_is_lost(router: Router, phase: Callable[..., AsyncIterator[Answer]], side: str) -> None:
    job = make_job("a", prompt())
    with contextlib.ExitStack() as stack:
        answer = await phase(router, stack, job)  # type: ignore[misc]
        await getattr(router, side).lose_link()
        await asyncio.sleep(0.02)
    messages = await answer.ended()
    if phase in (landed, generating):
        await until(lambda: router.finished("a"))
        assert router.tokens("a") == expected(prompt(), 8)[1:]
    else:
        assert isinstance(messages[-1], AttemptFailed)
        assert messages[-1].code in ("node_lost", "transfer_failed")
    await settle(router)
    if phase is computing:
        assert ships(router, "failed") == (1, 1)


async def test_decode_refuses_what_it_cannot_take(router: Router) -> None:
    target = router.decode.target
    cases = {
        "fenced": dataclasses.replace(target, epoch=target.epoch - 1),
        "incompatible": dataclasses.replace(target, fingerprint="other"),
    }
    for code, wrong in cases.items():
        (failed,) = await router.post_prefill(make_job(code, prompt()), wrong).ended()
        assert (type(failed), failed.code) == (AttemptFailed, code)
    router.decode.loaded.draining = True
    (failed,) = await router.post_prefill(make_job("draining", prompt()), target).ended()
    assert (failed.code, "is draining" in failed.message) == ("grant_refused", True)
    await settle(router)


async def test_decode_with_a_smaller_pool_refuses_long_prompts() -> None:
    async with pair(decode_blocks=8) as router:
        (failed,) = await router.post_prefill(make_job("a", prompt()), router.decode.target).ended()
        assert failed.code == "context_length_exceeded"
        await complete(router, make_job("b", prompt(20)))
        await settle(router)


async def test_an_address_where_nobody_listens(router: Router) -> None:
    target = dataclasses.replace(router.decode.target, link_address="127.0.0.1:1")
    (failed,) = await router.post_prefill(make_job("a", prompt()), target).ended()
    assert failed.code == "node_lost"
    await settle(router)


async def test_the_same_attempt_twice_at_once(router: Router) -> None:
    job = make_job("a", prompt())
    with contextlib.ExitStack() as stack:
        answer = await computing(router, stack, job)
        again = router.post_prefill(job, router.decode.target)
        await again.ended()
    assert (again.status, again.error["param"]) == (400, "attempt")
    assert [type(m) for m in await answer.ended()] == [FirstToken, ShipDone]
    await until(lambda: router.finished("a"))
    assert router.tokens("a") == expected(prompt(), 8)[1:]
    await settle(router)


async def test_a_late_end_of_a_ship_does_not_touch_the_attempt_that_repeats_it(router: Router) -> None:
    job = make_job("a", prompt())
    with contextlib.ExitStack() as stack:
        answer = await computing(router, stack, job)
        stack.enter_context(router.prefill.frozen_link())
        await router.cancel(job)
        await answer.ended()
        again = router.post_prefill(job, router.decode.target)
        await until(lambda: router.prefill.service._answers)
    failed = (await again.ended())[-1]
    assert (type(failed), failed.code) == (AttemptFailed, "cancelled")
    await settle(router)


async def test_a_drain_lets_attempts_finish_and_takes_no_new_ones(router: Router) -> None:
    router.prefill.pause_at(1)
    job = make_job("a", prompt())
    answer = router.post_prefill(job, router.decode.target)
    await until(lambda: router.prefill.paused)
    router.prefill.stop.handle(signal.SIGTERM)
    await until(lambda: router.prefill.node.state == "draining")
    refused = router.post_prefill(make_job("b", prompt()), router.decode.target)
    await refused.ended()
    assert (refused.status, refused.error["code"]) == (503, "draining")
    async with httpx.AsyncClient(trust_env=False) as client:
        scraped = await client.get(f"{router.prefill.node.address.url}/metrics")
    assert 'kvferry_kv_pool_blocks{model_name="toy",role="prefill"}' in scraped.text
    router.prefill.resume()
    assert [type(m) for m in await answer.ended()] == [FirstToken, ShipDone]
    await asyncio.wait_for(asyncio.shield(router.prefill.run), 5)
    await until(lambda: router.finished("a"))
    await router.decode.settle()


async def test_a_hurried_end_fails_what_runs_within_seconds(router: Router) -> None:
    """The end is asked for in the second of three chunks, and known to the engine before that chunk is computed."""
    router.prefill.pause_at(1)
    answer = router.post_prefill(make_job("a", prompt()), router.decode.target)
    await until(lambda: router.prefill.paused)
    began = time.monotonic()
    router.prefill.stop.handle(signal.SIGINT)
    await until(lambda: router.prefill.loaded.engine._stopping)
    router.prefill.resume()
    messages = await answer.ended()
    await asyncio.wait_for(asyncio.shield(router.prefill.run), 5)
    assert time.monotonic() - began < 5
    assert (type(messages[-1]), messages[-1].code) == (AttemptFailed, "draining")
    await router.decode.settle()


async def test_a_message_of_the_wrong_kind_is_refused() -> None:
    async with worker("prefill", make_engine()) as prefill, httpx.AsyncClient(trust_env=False) as client:
        for path in ("prefill", "cancel"):
            response = await client.post(f"{prefill.node.address.url}/attempts/{path}", content=b"\x01")
            assert response.status_code == 400
        await prefill.settle()


async def test_no_step_from_grant_to_hand_over_waits_for_a_busy_loop(router: Router) -> None:
    """While the loop of both nodes stands still: reserve, grant, compute, ship, commit, start, quiet."""
    started = threading.Event()
    start = router.decode.engine.start

    def told(*args: Any, **named: Any) -> None:
        start(*args, **named)
        started.set()

    router.decode.engine.start = told  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        answer = await offered(router, stack, make_job("a", prompt()))
        stack.close()
        assert started.wait(2.0)
        pool = router.prefill.engine.pool
        wait_for(lambda: pool.available == pool.num_blocks, 2.0)
    assert [type(m) for m in await answer.ended()] == [FirstToken, ShipDone]
    await until(lambda: router.finished("a"))
    assert router.tokens("a") == expected(prompt(), 8)[1:]
    await settle(router)


async def test_a_grant_withdrawn_by_the_engine_reaches_prefill_past_a_busy_loop(router: Router) -> None:
    with contextlib.ExitStack() as stack:
        answer = await waiting_for_room(router, stack, make_job("a", prompt()))
        router.decode.loaded.engine.submit(lambda engine: engine.cancel("a", 0))
        wait_for(lambda: not router.prefill.service._ships.sender.transfers, 2.0)
    failed = (await answer.ended())[-1]
    assert (type(failed), failed.code) == (AttemptFailed, "cancelled")
    await settle(router)


def broken_once(engine: Engine) -> None:
    """The scheduler breaks on the next attempt or reservation that it is to queue."""
    enqueue = engine.scheduler.enqueue

    def broken(entry: object) -> None:
        engine.scheduler.enqueue = enqueue  # type: ignore[method-assign]
        raise RuntimeError("injected")

    engine.scheduler.enqueue = broken  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_command_that_breaks_an_engine_answers_its_attempt(router: Router, side: str) -> None:
    broken_once(getattr(router, side).engine)
    (failed,) = await router.post_prefill(make_job("a", prompt()), router.decode.target).ended()
    assert (type(failed), failed.code) == (AttemptFailed, "node_lost")
    await complete(router, make_job("b", prompt()))
    await settle(router)


async def test_a_hand_over_that_breaks_the_engine_ends_on_the_stream(router: Router) -> None:
    register = router.decode.engine.pool.register

    def broken(*_: object) -> None:
        router.decode.engine.pool.register = register  # type: ignore[method-assign]
        raise RuntimeError("injected")

    router.decode.engine.pool.register = broken  # type: ignore[method-assign, assignment]
    answer = router.post_prefill(make_job("a", prompt()), router.decode.target)
    assert [type(m) for m in await answer.ended()] == [FirstToken, ShipDone]
    await until(lambda: router.failed)
    assert [(f.request_id, f.code) for f in router.failed] == [("a", "node_lost")]
    await complete(router, make_job("b", prompt()))
    await settle(router)


async def test_a_local_attempt_that_breaks_the_engine_ends_on_the_stream(router: Router) -> None:
    broken_once(router.decode.engine)
    assert (await router.generate(make_job("a", prompt()))).status_code == 202
    await until(lambda: router.failed)
    assert [(f.request_id, f.code) for f in router.failed] == [("a", "node_lost")]
    await router.decode.settle()


async def test_a_vector_is_made_without_decode_and_never_shipped(router: Router) -> None:
    job = dataclasses.replace(make_job("a", prompt()), work=Embed("last", normalize=False))
    (first,) = await router.post_prefill(job).ended()
    assert (first.delta.token_ids, first.delta.finish_reason) == ((), "stop")
    assert struct.unpack("<f", first.delta.vector) == (toy_next(prompt()),)
    assert first.delta.reuse == Reuse(len(prompt()), computed=len(prompt()), written=len(prompt()) // 4 * 4)
    refused = router.post_prefill(dataclasses.replace(job, attempt=1), router.decode.target)
    await refused.ended()
    assert (refused.status, refused.error["param"]) == (400, "target")
