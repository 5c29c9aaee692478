"""Drains over a slow link: they end in their grace period, streams pause for a bounded time, and routers are told of
those that could not be moved."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvferry.decode_worker import migration_sender
from tests.decode_pair import MOST, Both, decode_pair, prompt
from tests.toy import expected
from tests.waiting import until
from tests.worker_pair import Worker

GRACE_S = 1.5


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with decode_pair(drain_timeout=GRACE_S) as nodes:
        yield nodes


def throttle(worker: Worker, block_s: Callable[[], float]) -> None:
    """Each block that this node sends takes so many seconds more, one after the other; none waits while that is 0."""
    link = worker.loaded.link
    send, free_at = link.send_block, 0.0

    def slowly(peer: Any, tag: int, buffer: Any, done: Any) -> None:
        nonlocal free_at
        now, slow_s = time.monotonic(), block_s()
        free_at = max(free_at, now) + slow_s if slow_s else now
        link.call_later(free_at - time.monotonic(), lambda: send(peer, tag, buffer, done))

    link.send_block = slowly  # type: ignore[method-assign]


async def test_a_drain_over_a_slow_link_ends_in_its_grace_period_and_tells_the_router(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    """The router then has the stream recovered elsewhere, at once and without a suspicion that it kills its nodes."""
    caplog.set_level(logging.INFO)
    source = both.source.decode
    throttle(source, lambda: 0.4)
    job = await both.streams("a")
    moving, began = asyncio.create_task(both.move(job)), time.monotonic()
    source.stop.requested.set()
    source.resume()
    await asyncio.wait_for(asyncio.shield(source.run), 15)
    assert time.monotonic() - began < GRACE_S + 2.0
    assert [(failed.request_id, failed.code) for failed in both.source.failed] == [("a", "draining")]
    assert both.source.tokens("a") == expected(prompt(1), MOST)[: len(both.source.tokens("a"))]
    assert (await moving).status_code == 503
    assert "1 request did not end or move within --drain-timeout" in caplog.text
    await both.target.decode.settle()
    assert not both.target.deltas


async def test_a_stream_does_not_pause_for_long_on_a_slow_link(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link moves, so no ship stalls; the stream goes on where it is, and may be moved later."""
    monkeypatch.setattr(migration_sender, "PAUSE_S", 0.4)
    source, slow_s = both.source.decode, [0.0]
    throttle(source, lambda: slow_s[0])
    stand = source.engine.moving.snapshot

    def standing(transfer: int) -> Any:
        slow_s[0] = 0.6
        return stand(transfer)

    source.engine.moving.snapshot = standing  # type: ignore[method-assign]
    job = await both.streams("a")
    moving, seen = asyncio.create_task(both.move(job)), len(both.source.deltas)
    source.resume()
    answer = await moving
    assert answer.json()["error"]["code"] == "transfer_failed"
    await until(lambda: len(both.source.deltas) > seen + 2)
    slow_s[0], source.engine.moving.snapshot = 0.0, stand  # type: ignore[method-assign]
    moved = await both.move(job, 2)
    assert moved.status_code == 202, moved.text
    await both.finished(job)
    await both.settle()
