"""Blocks of a prompt come from the node that holds them, over real HTTP and UCX: nobody computes them again, and what
befalls a fetch costs no more than that."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine import replication
from kvferry.protocol.messages import Holder, Job
from kvferry.worker import block_fetches, fetch_client, fetch_server
from tests.toy import VOCAB, expected, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, pair

LENGTH = 42
FULL = LENGTH // 4


def prompt(seed: int = 0, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def job(name: str, holder: Worker | None, blocks: int = FULL, seed: int = 0, most: int = 1, **change: Any) -> Job:
    made = make_job(name, prompt(seed), most)
    if holder is not None:
        made = replace(made, holder=Holder(replace(holder.target, **change), blocks))
    return made


def ended(worker: Worker, outcome: str) -> float:
    return float(worker.node.metrics.fetches.ended[outcome]._value.get())


def blocks(worker: Worker, way: str) -> float:
    return float(worker.node.metrics.fetches.blocks[way]._value.get())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no fetch late."""
    monkeypatch.setattr(fetch_client, "MIN_S", 30.0)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """The decode node holds the prompt, and the prefill node nothing."""
    async with pair(prefill_blocks=100, decode_blocks=100) as running:
        await running.generate(job("before", None))
        await until(lambda: running.finished("before"))
        yield running


async def first_of(router: Router, asked: Job) -> Any:
    """The delta of a prompt that ends on the prefill node."""
    (first, *_) = await router.post_prefill(asked).ended()
    assert list(first.delta.token_ids) == expected(list(asked.token_ids), 1)
    assert first.delta.reuse.balanced
    return first.delta


async def settle(router: Router) -> None:
    for node in (router.prefill, router.decode):
        await node.settle()


def awaits(worker: Worker) -> bool:
    return bool(worker.service.endpoints.fetches._client.transfers)


async def test_what_ends_in_the_turn_in_which_its_blocks_land_is_counted_once(router: Router) -> None:
    """The queue of a node lost as many tokens as the prompt has, and its books did not balance: the process ended."""
    mine = router.prefill.service.endpoints.fetches

    def both(engine: Any) -> None:
        (fetching,) = mine._waiting.values()
        engine.cancel("a", 0)
        mine._resume(engine, fetching)

    with router.decode.frozen_engine():
        answer = router.post_prefill(job("a", router.decode))
        await until(lambda: awaits(router.prefill))
        router.prefill.loaded.engine.submit(both)
        (failed,) = await answer.ended()
        assert failed.code == "cancelled"
    await settle(router)
    assert router.prefill.engine.request_table.waiting_tokens == 0


async def test_a_prompt_that_another_node_holds_is_fetched_and_not_computed(router: Router) -> None:
    delta = await first_of(router, job("a", router.decode))
    assert (delta.reuse.fetched, delta.reuse.computed) == (FULL * 4, LENGTH - FULL * 4)
    assert (ended(router.prefill, "done"), blocks(router.prefill, "fetched")) == (1, FULL)
    await until(lambda: blocks(router.decode, "given") == FULL)
    again = await first_of(router, job("again", router.decode))
    assert (again.reuse.fetched, again.reuse.reused_prefill) == (0, FULL * 4)
    assert ended(router.prefill, "done") == 1
    await settle(router)


async def test_what_decode_holds_and_prefill_lacks_is_fetched_before_the_rest_is_shipped(router: Router) -> None:
    asked = replace(job("a", router.decode, most=6), token_ids=(*prompt(), *prompt(1)), prompt_len=2 * LENGTH)
    (first, shipped) = await router.post_prefill(asked, router.decode.target).ended()
    assert first.delta.reuse.fetched == FULL * 4
    assert shipped.blocks == 2 * LENGTH // 4 - FULL
    await until(lambda: router.finished("a"))
    assert [*first.delta.token_ids, *router.tokens("a")] == expected(list(asked.token_ids), 6)
    await settle(router)


async def test_a_decode_node_that_computes_a_prompt_itself_fetches_it_too() -> None:
    async with pair() as router:
        await router.post_prefill(job("before", None)).ended()
        await router.generate(job("a", router.prefill, most=5))
        await until(lambda: router.finished("a"))
        assert router.tokens("a") == expected(prompt(), 5)
        (reuse,) = [delta.reuse for delta in router.deltas if delta.reuse]
        assert (reuse.fetched, reuse.reused_decode, reuse.computed) == (FULL * 4, 0, LENGTH - FULL * 4)
        await settle(router)


async def test_what_is_here_already_is_not_fetched_and_neither_is_the_block_of_the_last_token(router: Router) -> None:
    await first_of(router, replace(job("short", None), token_ids=tuple(prompt(length=18)), prompt_len=18))
    whole = replace(job("a", router.decode), token_ids=tuple(prompt(length=40)), prompt_len=40)
    delta = await first_of(router, whole)
    assert (delta.reuse.reused_prefill, delta.reuse.fetched, delta.reuse.computed) == (16, 20, 4)
    await settle(router)


async def test_a_fetch_goes_piece_by_piece(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_client, "FETCH_BLOCKS", 3)
    delta = await first_of(router, job("a", router.decode))
    assert delta.reuse.fetched == FULL * 4
    assert ended(router.prefill, "done") == 4
    await settle(router)


async def test_what_came_before_the_holder_dies_is_kept_and_the_rest_computed(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_client, "FETCH_BLOCKS", 4)
    give, asked = fetch_server.PrefixSupplier._supply, []

    def twice(*args: Any) -> None:
        asked.append(1)
        if len(asked) < 3:
            give(*args)

    monkeypatch.setattr(fetch_server.PrefixSupplier, "_supply", twice)
    answer = router.post_prefill(job("a", router.decode))
    await until(lambda: len(asked) == 3)
    await router.decode.lose_link()
    (first, *_) = await answer.ended()
    assert list(first.delta.token_ids) == expected(prompt(), 1)
    assert (first.delta.reuse.fetched, first.delta.reuse.computed) == (32, LENGTH - 32)
    assert ended(router.prefill, "lost") == 1
    await router.prefill.settle()


async def test_a_holder_that_dies_in_the_middle_of_its_blocks_costs_the_computing(router: Router) -> None:
    with router.prefill.frozen_engine():
        answer = router.post_prefill(job("a", router.decode))
    with router.decode.frozen_engine():
        await until(lambda: awaits(router.prefill))
        await router.decode.lose_link()
    (first, *_) = await answer.ended()
    assert (first.delta.reuse.fetched, first.delta.reuse.computed) == (0, LENGTH)
    assert list(first.delta.token_ids) == expected(prompt(), 1)
    await router.prefill.settle()


@pytest.mark.parametrize("frozen", ["engine", "link"])
async def test_a_holder_that_stands_still_is_late_and_then_left_alone(
    router: Router, monkeypatch: pytest.MonkeyPatch, frozen: str
) -> None:
    monkeypatch.setattr(fetch_client, "MIN_S", 0.3)
    monkeypatch.setattr(block_fetches, "BACKOFF_S", 60.0)
    with router.decode.frozen_engine() if frozen == "engine" else router.decode.frozen_link():
        delta = await first_of(router, job("a", router.decode))
        assert (delta.reuse.fetched, delta.reuse.computed) == (0, LENGTH)
        assert ended(router.prefill, "late") + ended(router.prefill, "lost") == 1
    delta = await first_of(router, job("b", router.decode, seed=1))
    assert delta.reuse.computed == LENGTH
    assert sum(ended(router.prefill, outcome) for outcome in ("done", "late", "lost", "lacking")) == 1
    await settle(router)


@pytest.mark.parametrize("frozen", ["engine", "link", "asker"])
async def test_a_request_that_is_cancelled_gives_everything_back(router: Router, frozen: str) -> None:
    asked = job("a", router.decode)
    answer = router.post_prefill(asked)
    if frozen == "asker":
        with router.prefill.frozen_link():
            await router.cancel(asked, router.prefill)
    else:
        with router.decode.frozen_engine() if frozen == "engine" else router.decode.frozen_link():
            await router.cancel(asked, router.prefill)
            await answer.ended()
    await answer.ended()
    await settle(router)
    delta = await first_of(router, job("b", router.decode))
    assert delta.reuse.fetched + delta.reuse.reused_prefill == FULL * 4
    await settle(router)


async def test_requests_that_lack_the_same_blocks_await_one_fetch(router: Router) -> None:
    with router.decode.frozen_engine():
        answers = [router.post_prefill(job(name, router.decode)) for name in "abc"]
        await until(lambda: len(router.prefill.service.endpoints.fetches._waiting) == 3)
    for answer in answers:
        (first, *_) = await answer.ended()
        assert first.delta.reuse.fetched == FULL * 4
    await settle(router)
    assert (ended(router.prefill, "done"), blocks(router.decode, "given")) == (1, FULL)


async def test_who_awaits_the_fetch_of_one_that_is_cancelled_asks_itself(router: Router) -> None:
    with router.decode.frozen_engine():
        one, other = job("one", router.decode), job("other", router.decode)
        gone, stays = router.post_prefill(one), None
        await until(lambda: awaits(router.prefill))
        stays = router.post_prefill(other)
        await until(lambda: len(router.prefill.service.endpoints.fetches._waiting) == 2)
        await router.cancel(one, router.prefill)
        await gone.ended()
    (first, *_) = await stays.ended()
    assert first.delta.reuse.fetched == FULL * 4
    assert ended(router.prefill, "cancelled") == ended(router.prefill, "done") == 1
    await settle(router)


async def test_a_holder_that_has_the_blocks_no_more_says_so(router: Router) -> None:
    delta = await first_of(router, job("a", router.decode, seed=1))
    assert (delta.reuse.fetched, delta.reuse.computed) == (0, LENGTH)
    assert ended(router.prefill, "lacking") == 1
    await settle(router)


async def test_a_holder_that_drains_or_gives_to_many_refuses(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    router.decode.loaded.draining = True
    assert (await first_of(router, job("a", router.decode))).reuse.fetched == 0
    router.decode.loaded.draining = False
    await router.generate(job("held", None, seed=1))
    await until(lambda: router.finished("held"))
    monkeypatch.setattr(fetch_server, "AT_ONCE", 0)
    assert (await first_of(router, job("b", router.decode, seed=1))).reuse.fetched == 0
    await first_of(router, replace(job("c", router.decode), namespace="other"))
    assert ended(router.prefill, "refused") == 2
    assert ended(router.prefill, "lacking") == 1
    await settle(router)


async def test_another_tenants_blocks_are_not_found(router: Router) -> None:
    delta = await first_of(router, replace(job("a", router.decode), namespace="other"))
    assert delta.reuse.fetched == 0
    assert ended(router.prefill, "lacking") == 1
    await settle(router)


async def test_where_there_is_no_room_but_what_streams_may_need_it_is_refused_here(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "RESERVE_DIVISOR", 1)
    delta = await first_of(router, job("a", router.decode))
    assert delta.reuse.fetched == 0
    assert ended(router.prefill, "refused") == 1
    await settle(router)


async def test_who_cannot_be_reached_holds_nothing(router: Router) -> None:
    delta = await first_of(router, job("a", router.decode, link_address="127.0.0.1:1"))
    assert delta.reuse.computed == LENGTH
    assert ended(router.prefill, "lost") == 1
    await settle(router)
