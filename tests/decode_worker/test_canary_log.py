"""A decode node that finds what another one shipped to be wrong tells its routers, over real HTTP and UCX."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from kvferry.engine.canary import Canary
from kvferry.engine.engine import Engine
from kvferry.protocol.messages import Deviation
from tests.toy import VOCAB, ToyModel, expected, make_engine, make_job, runner_of
from tests.waiting import until
from tests.worker_pair import Router, worker


class Wrong(ToyModel):
    """Writes into its cache what it does not read there itself; `right` once it was repaired."""

    right = False

    def forward(self, token_ids, kv, plan, *wanted):  # type: ignore[no-untyped-def]
        hidden = super().forward(token_ids, kv, plan, *wanted)
        if not self.right:
            kv[plan.slots // plan.block_size, 0, 0, 0, plan.slots % plan.block_size, 0] += 1.0
        return hidden


def with_canary(engine: Engine) -> Engine:
    engine.canary = Canary(
        engine.pool, engine.request_table, runner_of(engine), engine.events, block_size=4, rate=1.0, tolerated=0.01
    )
    return engine


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    source = make_engine()
    source.runner.model = Wrong()
    async with (
        worker("prefill", source, node_id="p1") as prefill,
        worker("decode", with_canary(make_engine()), node_id="d1") as decode,
    ):
        running = Router(prefill, decode, "router")
        await running.connect()
        yield running
        await running.close()


async def complete(router: Router, name: str, seed: int) -> None:
    prompt = random.Random(seed).choices(range(1, VOCAB), k=30)
    job = make_job(name, prompt)
    answer = router.post_prefill(job, router.decode.target)
    first = (await answer.ended())[0].delta
    await until(lambda: router.finished(name))
    assert [*first.token_ids, *router.tokens(name)] == expected(prompt, 8)


async def test_routers_hear_of_ships_that_are_not_what_the_node_computes(router: Router) -> None:
    canary = router.decode.node.metrics.canary
    await complete(router, "a", 1)
    await until(lambda: router.deviations)
    epoch = router.prefill.loaded.lease().epoch
    assert router.deviations == [Deviation("a", ("p1", epoch))]
    assert canary.checks["differed"]._value.get() == 1
    assert canary.deviations.labels("decode", "p1")._value.get() == 1
    assert canary.largest._value.get() > 0.01
    router.prefill.engine.runner.model.right = True  # type: ignore[attr-defined]
    await complete(router, "b", 2)
    await until(lambda: canary.checks["agreed"]._value.get() == 1)
    await router.prefill.settle()
    await router.decode.settle()
    assert len(router.deviations) == 1
