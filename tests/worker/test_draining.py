"""The end of a drain: requests that did not end in time are given up, and their routers are told of it first."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from tests.toy import make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, worker

GRACE_S = 1.0


def slowed(node: Worker) -> None:
    """Its streams last longer than any drain."""
    run = node.engine.runner.run

    def slowly(*step: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return run(*step, **named)

    node.engine.runner.run = slowly  # type: ignore[method-assign]


async def streaming(node: Worker, count: int) -> Router:
    router = Router(None, node, "router")  # type: ignore[arg-type]
    await router.connect()
    for number in range(count):
        await router.generate(make_job(f"r{number}", list(range(20)), 190))
    await until(lambda: len({delta.request_id for delta in router.deltas}) == count)
    return router


async def test_streams_that_do_not_end_in_time_are_given_up_and_the_router_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with worker("decode", make_engine(400), drain_timeout=GRACE_S, node_id="a") as node:
        slowed(node)
        router, asked = await streaming(node, 3), time.monotonic()
        node.stop.requested.set()
        await asyncio.wait_for(asyncio.shield(node.run), 20)
        assert time.monotonic() - asked >= GRACE_S, "they had the time that they were promised"
        assert sorted((failed.request_id, failed.code) for failed in router.failed) == [
            (f"r{number}", "draining") for number in range(3)
        ]
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
            "3 requests did not end or move within --drain-timeout: routers recover them on other nodes"
        ]
        await router.close()


async def test_a_drain_whose_streams_end_gives_none_up() -> None:
    async with worker("decode", make_engine(400), drain_timeout=30.0) as node:
        router = await streaming(node, 2)
        node.stop.requested.set()
        await asyncio.wait_for(asyncio.shield(node.run), 20)
        assert not router.failed
        assert all(router.finished(f"r{number}") for number in range(2))
        await router.close()
