"""Everything fails at once, and again: every request still gets exactly its tokens, and the books balance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.protocol.errors import Cancelled, FatalRequest, KvferryError
from kvferry.protocol.messages import AttemptFailed, PrefillRequest
from kvferry.router.dispatch.interface import Output
from tests.fake_workers import CRASH, PROMPT, Bench, FakeWorker, collect, decode, expected, honest_prefill, ids, prefill


def flaky(dice: random.Random) -> Any:
    """An honest prefill that now and then crashes, gives up or stops, before or after any of its messages."""

    async def script(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        async for message in honest_prefill(worker, request):
            fate = dice.random()
            if fate < 0.02:
                yield CRASH
                return
            if fate < 0.1:
                code = dice.choice(["transfer_failed", "server_error", "grant_refused", "overloaded", "node_lost"])
                yield AttemptFailed(request.job.request_id, request.job.attempt, code, "scripted")
                return
            if fate < 0.13:
                return
            await asyncio.sleep(dice.random() * 0.01)
            yield message
            await asyncio.sleep(dice.random() * 0.01)

    return script


async def restart(bench: Bench, old: FakeWorker) -> None:
    old.crash()
    await asyncio.sleep(0.05)
    make = prefill if old.role == "prefill" else decode
    await bench.add(make(old.node_id, epoch=old.epoch + 1, prefill_script=old.prefill_script, step_s=old.step_s))


async def break_things(bench: Bench, dice: random.Random) -> None:
    while True:
        await asyncio.sleep(0.25)
        old = bench[dice.choice(["p1", "p2", "d1", "d2", "d1", "d2"])]
        await restart(bench, old)
        await asyncio.sleep(0.1)
        bench.store.available = dice.random() < 0.8


async def one(bench: Bench, number: int, dice: random.Random) -> str:
    """One client: reads to the end, or leaves in the middle, or cancels."""
    prompt, count = (number, *PROMPT[: dice.randint(1, 60)]), dice.choice([1, 2, 17, 60])
    await asyncio.sleep(dice.random() * 2)
    for _ in range(100):
        try:
            dispatch = bench.start(count, prompt)
            break
        except KvferryError:
            await asyncio.sleep(0.05)
    leaves_after = dice.randint(1, 20) if dice.random() < 0.2 else None
    outputs: list[Output] = []
    if leaves_after is None and number % 2:
        dispatch.listen(outputs.append)
    try:
        async for output in dispatch:
            outputs.append(output)
            assert ids(outputs) == expected(prompt, len(ids(outputs)))
            if leaves_after and len(outputs) == leaves_after:
                await dispatch.cancel()
                with pytest.raises(Cancelled):
                    await collect(dispatch)
                return "left"
    except FatalRequest:
        return "twice bereft"
    assert ids(outputs) == expected(prompt, count)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    return "done"


@pytest.mark.parametrize("seed", range(3))
async def test_storm(seed: int) -> None:
    dice = random.Random(seed)
    script = flaky(dice)
    workers = [prefill("p1", prefill_script=script), prefill("p2", prefill_script=script), decode("d1"), decode("d2")]
    async with Bench(workers, max_wait_s=10) as bench:
        storm = asyncio.create_task(break_things(bench, dice))
        try:
            fates = await asyncio.gather(
                *(one(bench, number, random.Random(seed * 1000 + number)) for number in range(60))
            )
        finally:
            storm.cancel()
            await asyncio.gather(storm, return_exceptions=True)
            bench.store.available = True
        assert fates.count("done") > 40
        assert fates.count("twice bereft") <= 3
        assert sum(bench.retries().values()) > 0
