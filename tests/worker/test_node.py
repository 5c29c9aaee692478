"""A node's life as others see it: when it is ready, when it only lives."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
from unittest.mock import patch

import httpx
import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.registry import LeaseKeeper
from kvferry.worker import membership, watchdog
from kvferry.worker.node import Ending
from tests.toy import expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, worker

PROMPT = list(range(20))


async def answers(node: Worker) -> tuple[int, int, str]:
    """Status of /ready and of /health, and what the latter calls the node."""
    async with httpx.AsyncClient(trust_env=False, base_url=node.node.address.url) as client:
        ready, health = await client.get("/ready"), await client.get("/health")
        assert {name: ready.json()[name] for name in ("status", "progress")} == {
            name: health.json()[name] for name in ("status", "progress")
        }, "who looks why it is not ready sees how far it is"
    return ready.status_code, health.status_code, health.json()["status"]


async def test_a_node_is_ready_once_its_lease_is_written() -> None:
    store = MemoryStore()
    store.available = False
    read, write = os.pipe()
    os.set_blocking(read, False)
    with os.fdopen(read, "rb") as reports, os.fdopen(write, "wb"):
        async with worker("decode", make_engine(), store=store, state="joining", status_fd=write) as node:
            await until(lambda: node.node.metrics.lease_renewals["failed"]._value.get() >= 2)
            assert await answers(node) == (503, 200, "joining")
            assert b"ready" not in (reports.read() or b"")
            store.available = True
            await until(lambda: node.node.state == "ready")
            assert await answers(node) == (200, 200, "ready")
            assert [lease.node_id for lease in await store.nodes()] == [node.node.address.node_id]
            report = json.loads((reports.read() or b"").splitlines()[-1])
            assert (report["status"], report["url"]) == ("ready", node.node.address.url)
            assert report["facts"]["link"] == node.node.loaded.link.address


async def test_a_node_whose_lease_lapsed_serves_those_who_know_it() -> None:
    store = MemoryStore()
    impatient = functools.partial(LeaseKeeper, lease_s=0.3, period_s=0.02)
    with patch.object(membership, "LeaseKeeper", impatient):
        async with worker("decode", make_engine(), store=store) as node:
            router = Router(None, node, "router")  # type: ignore[arg-type]
            await router.connect()
            store.available = False
            await until(lambda: node.node.state == "joining")
            assert await answers(node) == (503, 200, "joining")
            assert (await router.generate(make_job("a", PROMPT))).status_code == 202
            await until(lambda: router.finished("a"))
            assert router.tokens("a") == expected(PROMPT, 8)
            store.available = True
            await until(lambda: node.node.state == "ready")
            assert await answers(node) == (200, 200, "ready")
            await router.close()
            await node.settle()


async def test_a_node_that_joins_ends_when_asked() -> None:
    store = MemoryStore()
    store.available = False
    async with worker("prefill", make_engine(), store=store, state="joining") as node:
        node.stop.handle(signal.SIGTERM)
        assert await asyncio.wait_for(asyncio.shield(node.run), 5)


@pytest.mark.parametrize("thread", ["engine", "link"])
async def test_health_and_lease_tell_how_long_a_thread_has_not_moved(thread: str) -> None:
    async with worker("decode", make_engine()) as node:
        with getattr(node, f"frozen_{thread}")():
            await until(lambda: getattr(node.loaded.liveness.pulse, f"{thread}_s") > 1.2)
            assert getattr(node.loaded.lease().pulse, f"{thread}_s") > 1.2
            async with httpx.AsyncClient(trust_env=False, base_url=node.node.address.url) as client:
                health = await client.get("/health")
            assert health.json()["pulse"][f"{thread}_s"] > 1.2
            assert await answers(node) == (200, 200, "ready")
        await until(lambda: getattr(node.loaded.liveness.pulse, f"{thread}_s") < 1.2)
        await node.settle()


async def test_a_node_with_a_fault_is_not_ready_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LINK_S", 1.2)
    store = MemoryStore()
    async with worker("decode", make_engine(), store=store) as node:
        with node.frozen_link():
            await until(lambda: node.loaded.fault is not None)
            assert node.node.state == "broken"
            await until(node.run.done)
        assert node.run.result() is Ending.BROKEN
        assert await store.nodes() == []
        await node.loaded.drain(node.stop)
