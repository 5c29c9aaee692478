"""Nodes tell of what was predicted of them and is not there, over real HTTP and a real link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.prefix_reuse import Missed
from tests.toy import make_job
from tests.waiting import until
from tests.worker_pair import Router, pair

PROMPT = list(range(30))


async def settle(router: Router) -> None:
    await router.prefill.settle()
    await router.decode.settle()


async def missed_by_decode(router: Router, predicted: tuple[int, int]) -> Missed:
    """What the decode node says when it is to compute the prompt itself."""
    assert (await router.generate(replace(make_job("local", PROMPT), predicted=predicted))).status_code == 202
    await until(lambda: router.finished("local"))
    (account,) = [delta.reuse for delta in router.deltas if delta.request_id == "local" and delta.reuse]
    return account.missed


@pytest.mark.parametrize("cut", ["link", "request"])
async def test_blocks_that_were_granted_and_never_arrived(cut: str) -> None:
    async with pair() as router:
        router.prefill.pause_at(1)
        job = make_job("shipped", PROMPT)
        answer = router.post_prefill(job, router.decode.target)
        await until(lambda: router.prefill.paused and router.decode.loaded.engine.load.open_grants)
        if cut == "link":
            await router.prefill.lose_link()
        else:
            await router.cancel(job)
        router.prefill.resume()
        await answer.ended()
        await settle(router)
        assert await missed_by_decode(router, (28, router.decode.target.epoch)) == (("not_arrived", 28),)
        await settle(router)


async def test_blocks_that_arrived_are_found_and_nothing_is_missed() -> None:
    async with pair() as router:
        await router.post_prefill(make_job("shipped", PROMPT), router.decode.target).ended()
        await until(lambda: router.finished("shipped"))
        assert await missed_by_decode(router, (28, router.decode.target.epoch)) == ()
        await settle(router)


async def test_what_was_predicted_of_a_process_that_this_one_replaced() -> None:
    async with pair() as router:
        epoch = router.prefill.loaded.lease().epoch
        job = replace(make_job("a", PROMPT), predicted=(28, epoch - 1))
        first, _ = await router.post_prefill(job, router.decode.target).ended()
        assert first.delta.reuse.missed == (("fenced", 28),)
        await until(lambda: router.finished("a"))
        assert all(delta.reuse is None for delta in router.deltas), "the decode node was to find nothing"
        await settle(router)
