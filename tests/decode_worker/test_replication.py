"""Blocks of running streams go to their buddies over real HTTP and UCX: they are reused there, and whatever befalls a
copy is no harm to its stream."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.decode_worker import replication
from kvferry.engine.engine import Engine
from kvferry.engine.request import Request
from kvferry.protocol.messages import DecodeTarget, Job
from tests.toy import VOCAB, expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, pair, worker

MOST = 150


def prompt(seed: int = 0, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def count(worker: Worker, name: str, label: str) -> float:
    return float(getattr(worker.node.metrics, name)[label]._value.get())


def held(worker: Worker, job: Job, output: int) -> int:
    """Blocks of the stream, as far as it will be after so many tokens, that the node has."""
    tokens = [*job.token_ids, *expected(list(job.token_ids), output)]
    request = Request(replace(job, token_ids=tuple(tokens)), worker.engine._request(job).root, 4)
    return len(worker.engine.pool.match(request.hashes))


def _slow(node: Worker) -> None:
    """A step takes as long as on a device of medium size: streams run while blocks travel."""
    run = node.engine.runner.run

    def slowly(*step: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return run(*step, **named)

    node.engine.runner.run = slowly  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "CHECK_S", 0.0)
    monkeypatch.setattr(replication, "BACKOFF_S", 0.2)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with pair(prefill_blocks=200, decode_blocks=200) as running:
        _slow(running.decode)
        yield running


async def streams(router: Router, name: str, buddy: DecodeTarget | None, most: int = MOST) -> Job:
    """Computed by the prefill node, it stands at its 70th token."""
    job = replace(make_job(name, prompt(len(name)), most), buddy=buddy)
    router.decode.pause_at(70)
    answer = router.post_prefill(job, router.decode.target)
    await answer.ended()
    await until(lambda: router.decode.paused)
    return job


async def finish(router: Router, job: Job) -> None:
    router.decode.resume()
    await until(lambda: router.finished(job.request_id))
    most = job.params.max_tokens
    assert router.tokens(job.request_id) == expected(list(job.token_ids), most)[1:]
    for node in (router.prefill, router.decode):
        await node.settle()


async def test_the_node_that_computed_a_prompt_gets_what_follows(router: Router) -> None:
    job = await streams(router, "a", router.prefill.target)
    router.decode.resume()
    await until(lambda: count(router.decode, "copies", "done") >= 2)
    await finish(router, job)
    had = held(router.prefill, job, MOST)
    assert had >= (40 + MOST) // 4 - 16
    assert count(router.decode, "copy_blocks", "sent") == count(router.prefill, "copy_blocks", "kept") == had - 10
    again = make_job("again", [*job.token_ids, *expected(list(job.token_ids), MOST - 1)], 2)
    answer = router.post_prefill(again, router.decode.target)
    (first, _) = await answer.ended()
    assert first.delta.reuse.reused_prefill == had * 4
    assert [*first.delta.token_ids] == expected(list(job.token_ids), MOST)[-1:]
    await until(lambda: router.finished("again"))
    for node in (router.prefill, router.decode):
        await node.settle()


async def test_streams_without_a_buddy_are_not_copied(router: Router) -> None:
    job = await streams(router, "a", None)
    await finish(router, job)
    assert sum(count(router.decode, "copies", outcome) for outcome in ("done", "refused", "failed")) == 0
    assert held(router.prefill, job, MOST) == 10


@pytest.mark.parametrize(
    ("change", "outcome"),
    [({"link_address": "127.0.0.1:1"}, "failed"), ({"epoch": 77}, "failed"), ({"fingerprint": "other"}, "failed")],
)
async def test_a_buddy_that_is_not_there_any_more_is_left_alone(
    router: Router, change: dict[str, Any], outcome: str
) -> None:
    job = await streams(router, "a", replace(router.prefill.target, **change))
    router.decode.resume()
    await until(lambda: count(router.decode, "copies", outcome))
    await finish(router, job)
    assert count(router.decode, "copies", "done") == 0
    assert count(router.decode, "copies", outcome) <= 10


async def test_a_buddy_that_drains_or_has_no_room_refuses_and_is_asked_again(router: Router) -> None:
    job = await streams(router, "a", router.prefill.target)
    router.prefill.loaded.draining = True
    router.decode.resume()
    await until(lambda: count(router.decode, "copies", "refused"))
    router.prefill.loaded.draining = False
    await until(lambda: count(router.decode, "copies", "done"))
    await finish(router, job)


async def test_the_link_breaks_while_a_copy_is_under_way(router: Router) -> None:
    job = await streams(router, "a", router.prefill.target)
    with router.prefill.frozen_engine():
        router.decode.resume()
        await until(lambda: router.decode.service._replication._making)
        await router.prefill.lose_link()
    router.decode.resume()
    await until(lambda: router.finished("a"))
    assert router.tokens("a") == expected(list(job.token_ids), MOST)[1:]
    await router.decode.settle()
    assert count(router.decode, "copies", "failed") >= 1


async def test_a_buddy_that_fails_again_and_again_is_asked_ever_less_and_costs_others_no_rest(router: Router) -> None:
    job = await streams(router, "a", replace(router.prefill.target, epoch=77))
    router.decode.resume()
    made = router.decode.service._replication
    await until(lambda: count(router.decode, "copies", "failed") >= 2)
    assert made._backoffs[replace(router.prefill.target, epoch=77)][1] >= 2 * replication.BACKOFF_S
    assert made._next <= time.monotonic() + replication.CHECK_S
    await finish(router, job)


async def test_a_stream_that_ends_while_its_copy_waits_for_a_grant(router: Router) -> None:
    job = await streams(router, "a", router.prefill.target)
    with router.prefill.frozen_engine():
        router.decode.resume()
        await until(lambda: router.decode.service._replication._making)
        await router.cancel(job, router.decode)
        await until(lambda: router.failed)
    for node in (router.prefill, router.decode):
        await node.settle()
    await until(lambda: count(router.decode, "copies", "failed"))
    assert count(router.decode, "copies", "failed") == 1
    assert not router.decode.service._replication._backoffs, "the buddy is not to blame"


async def test_two_decode_nodes_are_buddies_where_there_is_no_other() -> None:
    engines: list[Engine] = [make_engine(200), make_engine(200)]
    async with worker("decode", engines[0], node_id="a") as a, worker("decode", engines[1], node_id="b") as b:
        _slow(a)
        router = Router(None, a, "router")  # type: ignore[arg-type]
        await router.connect()
        job = replace(make_job("a", prompt(), MOST), buddy=b.target)
        await router.generate(job)
        await until(lambda: router.finished("a"))
        await until(lambda: count(a, "copies", "done"))
        assert router.tokens("a") == expected(list(job.token_ids), MOST)
        for node in (a, b):
            await node.settle()
        assert held(b, job, MOST) == count(b, "copy_blocks", "kept") > 10, "the prompt, too"
        await router.close()


async def test_a_buddy_that_drops_what_it_was_sent_is_left_alone(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "BACKOFF_S", 60.0)
    job = await streams(router, "a", router.prefill.target)
    router.decode.resume()
    router.decode.pause_at(20)
    await until(lambda: count(router.decode, "copies", "done") and router.decode.paused)
    pool = router.prefill.engine.pool

    def forget(engine: Engine) -> None:
        taken = pool.acquire("test", "request", [], pool.num_blocks)
        assert taken is not None
        pool.release("test", "request", taken)

    router.prefill.loaded.engine.submit(forget)
    await until(lambda: not pool.cached_blocks)
    router.decode.resume()
    await finish(router, job)
    assert count(router.decode, "copies", "failed") == 1
    assert not pool.cached_blocks
