"""What was predicted and not reused is counted by what became of it, and never set off against luck."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

import kvferry.router.dispatch.hedging
from kvferry.placement.types import Placement
from kvferry.protocol.errors import Fenced, Incompatible, KvferryError, NodeDown, TransferFailed
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.messages import PrefillRequest
from kvferry.protocol.prefix_reuse import Missed, Reuse
from kvferry.router.dispatch.prediction import Prediction
from tests.fake_workers import (
    BLOCK,
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    ids,
    lease_of,
    prefill,
)
from tests.router.dispatch.test_dispatch_failures import crash_at_once, failing


async def silent(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield SILENCE


def counted(bench: Bench) -> tuple[int, int, int, dict[str, int]]:
    """Predicted, actual and unpredicted tokens, and those missed by reason."""
    reuse = bench.metrics.reuse.of("m")
    figures = [int(counter._value.get()) for counter in (reuse.predicted, reuse.actual, reuse.unpredicted)]
    missed = {reason: int(n) for reason, each in reuse.misses.items() if (n := each._value.get())}
    assert figures[0] + figures[2] == figures[1] + sum(missed.values()), "predicted + luck = actual + missed"
    return figures[0], figures[1], figures[2], missed


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (crash_at_once, "node_lost"),
        (failing("node_lost"), "node_lost"),
        (failing("fenced"), "fenced"),
        (failing("incompatible"), "layout"),
        (failing("transfer_failed"), "not_arrived"),
        (failing("draining"), "refused"),
        (failing("overloaded"), "refused"),
    ],
    ids=["crash", "node_lost", "fenced", "incompatible", "transfer_failed", "draining", "overloaded"],
)
async def test_a_prefix_on_a_node_that_the_request_had_to_leave(script: Any, reason: str) -> None:
    """Forty tokens are on p1 as the index says; p2, which serves the request, has sixteen that nobody knew of."""
    async with Bench([prefill("p1", prefill_script=script), prefill("p2"), decode()], fetch=False) as bench:
        hashes = chain(root_hash("fp", "tenant"), PROMPT, BLOCK)
        await bench.store.publish("p1", 1, rows_of(hashes[:10]), ())
        assert ids(await collect(bench.start(6, namespace="tenant"))) == expected(PROMPT, 6)
        assert [len(bench[name].prefills) for name in ("p1", "p2")] == [1, 1]
        assert counted(bench) == (40, 16, 0, {reason: 24})


async def test_a_prefix_on_a_node_that_another_one_outran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.router.dispatch.hedging, "MIN_LATE_S", 0.2)
    async with Bench([prefill("p1", prefill_script=silent), prefill("p2"), decode("d1"), decode("d2")]) as bench:
        await bench.store.publish("p1", 1, rows_of(chain(root_hash("fp", "tenant"), PROMPT, BLOCK)[:10]), ())
        assert ids(await collect(bench.start(6, namespace="tenant"))) == expected(PROMPT, 6)
        assert bench.retries() == {"hedge": 1}
        assert counted(bench) == (40, 16, 0, {"outrun": 24})


async def test_a_node_that_has_dropped_it_says_so() -> None:
    async with Bench([prefill("p1"), decode()]) as bench:
        await bench.store.publish("p1", 1, rows_of(chain(root_hash("fp", "tenant"), PROMPT, BLOCK)[:10]), ())
        await collect(bench.start(3, namespace="tenant"))
        assert counted(bench) == (40, 16, 0, {"evicted": 24})


async def test_luck_hides_no_miss() -> None:
    async with Bench([prefill("p1"), decode()]) as bench:
        await collect(bench.start(3))
        assert counted(bench) == (0, 16, 16, {})
        await bench.store.publish("p1", 1, rows_of(chain(root_hash("fp", "tenant"), PROMPT, BLOCK)[:10]), ())
        await collect(bench.start(3, namespace="tenant"))
        assert counted(bench) == (40, 32, 16, {"evicted": 24})


async def test_nodes_are_told_what_is_predicted_of_them_and_of_which_process() -> None:
    async with Bench([prefill("p1"), decode()]) as bench:
        await bench.store.publish("p1", 1, rows_of(chain(root_hash("fp", "tenant"), PROMPT, BLOCK)[:10]), ())
        await collect(bench.start(3, namespace="tenant"))
        assert bench["p1"].prefills[0].job.predicted == (40, 1)


def placed(cached: int) -> Placement:
    return Placement(lease_of("p1", "prefill"), None, cached, 0.0, 0.0)


Told = tuple[int, KvferryError | None]


@pytest.mark.parametrize(
    ("attempts", "winner", "reused", "told", "missed"),
    [
        ([(40, None)], 0, 40, (), {}),
        ([(40, None)], 0, 48, (), {}),
        ([(40, None)], 0, 16, (("not_arrived", 4), ("evicted", 20)), {"not_arrived": 4, "evicted": 20}),
        ([(40, NodeDown("")), (32, None)], 1, 16, (("evicted", 16),), {"evicted": 16, "node_lost": 8}),
        ([(40, NodeDown("")), (64, None)], 1, 16, (("evicted", 48),), {"evicted": 24}),
        ([(40, Fenced("")), (32, Incompatible("")), (8, None)], 2, 8, (), {"layout": 24, "fenced": 8}),
        ([(40, Fenced("")), (64, TransferFailed("")), (0, None)], 2, 0, (), {"not_arrived": 40}),
        ([(40, None), (0, None)], 1, 0, (), {"outrun": 40}),
        ([(40, None), (0, None)], 0, 0, (("evicted", 40),), {"evicted": 40}),
        ([(0, NodeDown("")), (40, None)], 1, 0, (("evicted", 40),), {}),
        ([(40, None)], 0, 0, (("evicted", 8),), {"evicted": 8, "unknown": 32}),
    ],
)
def test_tokens_are_laid_to_what_took_them(
    attempts: list[Told], winner: int, reused: int, told: Missed, missed: Mapping[str, int]
) -> None:
    prediction = Prediction()
    for number, (cached, _) in enumerate(attempts):
        prediction.began(number, placed(cached))
    for number, (_, error) in enumerate(attempts):
        if error is not None:
            prediction.ended(number, error)
    assert prediction.tokens == attempts[0][0]
    account = Reuse(128, reused, computed=128 - reused, missed=told)
    assert prediction.missed(winner, account) == missed
