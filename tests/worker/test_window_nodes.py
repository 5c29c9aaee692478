"""Nodes of a model with windows, over real HTTP and UCX: prompts are shipped with the pages of a window, prefixes are
fetched, copied and kept on disk with them, streams are moved and recovered; the books balance on all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.decode_worker import replication
from kvferry.engine.engine import Engine
from kvferry.protocol.messages import Holder, Job, MoveRequest
from kvferry.worker import fetch_client, local_writes, tiers
from tests.toy import VOCAB, expected, make_job
from tests.waiting import until
from tests.windowed_toy import make_windowed, windowed_toy_of
from tests.worker_pair import Router, Worker, routed, worker

WINDOW_BLOCKS = 4
"""Blocks of the full pages of a window: two pages of two."""
MOST = 100


def prompt(length: int = 42, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def engine_of(num_blocks: int = 240) -> Engine:
    return make_windowed(num_blocks)


def slow(node: Worker) -> None:
    """Streams run while blocks travel."""
    run = node.engine.runner.run

    def slowly(*step: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return run(*step, **named)

    node.engine.runner.run = slowly  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_client, "MIN_S", 30.0)
    monkeypatch.setattr(replication, "CHECK_S", 0.0)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with (
        worker("prefill", engine_of()) as prefill,
        worker("decode", engine_of()) as decode,
        routed(prefill, decode) as running,
    ):
        yield running


async def settle(router: Router) -> None:
    for node in (router.prefill, router.decode):
        await node.settle()


async def shipped(router: Router, job: Job) -> Any:
    """Compute a job on both nodes; the first delta and the ship."""
    first, ship = await router.post_prefill(job, router.decode.target).ended()
    await until(lambda: router.finished(job.request_id))
    made = [*first.delta.token_ids, *router.tokens(job.request_id)]
    assert made == expected(list(job.token_ids), job.params.max_tokens)
    assert first.delta.reuse.balanced
    return first.delta, ship


async def test_a_prompt_is_shipped_with_its_window_and_reused(router: Router) -> None:
    first, ship = await shipped(router, make_job("a", prompt(), 9))
    assert (first.reuse.computed, ship.blocks) == (42, 11 + WINDOW_BLOCKS + 2)
    first, ship = await shipped(router, make_job("b", [*prompt(), 1, 2], 9))
    assert (first.reuse.reused_prefill, first.reuse.computed) == (40, 4)
    assert ship.blocks == 1 + WINDOW_BLOCKS, "decode has ten blocks of tokens"
    await asyncio.gather(*(shipped(router, make_job(f"r{n}", prompt(3 + 9 * n, n), 12)) for n in range(6)))
    await settle(router)


async def test_a_lost_link_in_the_middle_of_a_ship_leaves_nothing(router: Router) -> None:
    router.prefill.pause_at(1)
    answer = router.post_prefill(make_job("a", prompt(60), 9), router.decode.target)
    await until(lambda: router.prefill.paused)
    await router.prefill.lose_link()
    router.prefill.resume()
    (failed,) = [each for each in await answer.ended() if hasattr(each, "code")]
    assert failed.code in ("node_lost", "transfer_failed")
    await settle(router)


async def test_a_prefix_is_fetched_with_its_window(router: Router) -> None:
    await router.generate(make_job("before", prompt(), 1))
    await until(lambda: router.finished("before"))
    job = replace(make_job("a", [*prompt(), 5], 1), holder=Holder(router.decode.target, 10))
    first, *_ = await router.post_prefill(job).ended()
    assert list(first.delta.token_ids) == expected([*prompt(), 5], 1)
    assert (first.delta.reuse.fetched, first.delta.reuse.computed) == (40, 3)
    assert router.prefill.node.metrics.fetches.blocks["fetched"]._value.get() == 10 + WINDOW_BLOCKS
    await settle(router)


async def test_a_stream_is_copied_with_its_window_and_goes_on_at_its_buddy(router: Router) -> None:
    slow(router.decode)
    job = replace(make_job("a", prompt(), MOST), buddy=router.prefill.target)
    await router.post_prefill(job, router.decode.target).ended()
    await until(lambda: router.decode.node.metrics.copies["done"]._value.get() >= 2)
    await until(lambda: router.finished("a"))
    known = [*prompt(), *expected(prompt(), MOST - 1)]
    windowed_toy_of(router.prefill.engine).computed.clear()
    again = replace(make_job("a2", known, 2), prompt_len=len(known))
    first, _ = await router.post_prefill(again, router.decode.target).ended()
    assert list(first.delta.token_ids) == expected(prompt(), MOST)[-1:]
    assert first.delta.reuse.reused_prefill >= len(known) - 64, "up to the end of the last copy"
    await until(lambda: router.finished("a2"))
    await settle(router)


async def test_streams_move_with_their_windows() -> None:
    store = MemoryStore()
    async with (
        worker("decode", engine_of(), store=store, node_id="a") as source,
        worker("decode", engine_of(), store=store, node_id="b") as target,
    ):
        routers = [Router(None, node, "router") for node in (source, target)]  # type: ignore[arg-type]
        for each in routers:
            await each.connect()
        slow(source)
        jobs = [make_job(f"r{number}", prompt(30 + number, number), MOST) for number in range(3)]
        for job in jobs:
            await routers[0].generate(job)
        await until(lambda: all(len(routers[0].tokens(job.request_id)) > 5 for job in jobs))
        answers = await asyncio.gather(
            *(routers[0]._post(source, "move", MoveRequest(job.request_id, 0, 1, target.target)) for job in jobs)
        )
        assert [answer.text for answer in answers if answer.status_code != 202] == []
        for job in jobs:
            await until(lambda: routers[1].finished(job.request_id))  # noqa: B023
            made = [*routers[0].tokens(job.request_id), *routers[1].tokens(job.request_id)]
            assert made == expected(list(job.token_ids), MOST)
        assert target.node.metrics.step_tokens["prefill"]._value.get() == 0, "nothing is computed again"
        for node in (source, target):
            await node.settle()
        for each in routers:
            await each.close()


async def test_a_disk_keeps_windows_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_writes, "GATHERING_S", 0.0)
    monkeypatch.setattr(tiers, "MIN_S", 30.0)
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: tokens * 1.0)
    for turn in range(2):
        async with (
            worker("prefill", engine_of(), kv_disk_path=str(tmp_path), kv_disk_gib=1.0) as prefill,
            worker("decode", engine_of()) as decode,
            routed(prefill, decode) as router,
        ):
            first, *_ = await router.post_prefill(make_job("a", prompt(60), 1)).ended()
            assert list(first.delta.token_ids) == expected(prompt(60), 1)
            assert (first.delta.reuse.reused_prefill, first.delta.reuse.computed) == ((56, 4) if turn else (0, 60))
            blocks = prefill.node.metrics.tiers.blocks["disk"]
            if turn:
                assert blocks["read"]._value.get() == 14 + WINDOW_BLOCKS
            else:
                await until(lambda: blocks["written"]._value.get() == 15 + 2 * 5)  # noqa: B023
            await settle(router)
