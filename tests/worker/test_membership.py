"""When a node that was asked to end may leave: another one does its work, and stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker import membership
from kvferry.worker.membership import Membership
from tests.waiting import until

LEASE = NodeLease("d1", "decode", 1, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)
SOON_S = 0.3
"""Several looks for relief."""


@pytest.fixture(autouse=True)
def _quick() -> object:
    with patch.object(membership, "REPLACEMENT_CHECK_S", 0.02):
        yield


@asynccontextmanager
async def member(store: MemoryStore, **changes: object) -> AsyncIterator[Membership]:
    """A node that has joined."""
    made = Membership(store, lambda: replace(LEASE, **changes), list, WorkerMetrics("decode"))  # type: ignore[arg-type]
    await made.join()
    try:
        yield made
    finally:
        store.available = True
        await made.leave()


async def left(*waiting: asyncio.Task[None]) -> list[bool]:
    """Which of them have stopped waiting, after some time."""
    await asyncio.sleep(SOON_S)
    return [task.done() for task in waiting]


def leaving(node: Membership, may_wait: Callable[[], bool] = lambda: True) -> asyncio.Task[None]:
    return asyncio.create_task(node.wait_for_replacement(may_wait))


async def test_the_last_one_stays_until_another_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.INFO, "kvferry.worker"):
        async with member(store) as node:
            ends = leaving(node)
            await store.announce(replace(LEASE, node_id="p1", role="prefill"))
            await store.announce(replace(LEASE, node_id="d2", model="other"))
            await store.announce(replace(LEASE, node_id="d3", state="draining"))
            assert await left(ends) == [False]
            (own,) = [lease for lease in await store.nodes() if lease.node_id == "d1"]
            assert (own.state, own.leaving) == ("ready", True), "it works on, and says that nobody may count on it"
            assert len(caplog.messages) == 1
            async with member(store, node_id="d4"):
                await until(ends.done)


async def test_two_that_leave_at_once_do_not_count_on_each_other() -> None:
    """As a rollout without surge, or a machine that is emptied, asks them to: one stays, whichever was later."""
    store = MemoryStore()
    async with member(store) as one, member(store, node_id="d2") as other:
        ends = leaving(one), leaving(other)
        assert not all(await left(*ends))
        async with member(store, node_id="d3"):
            await until(lambda: all(each.done() for each in ends))


async def test_without_a_registry_nobody_can_tell_and_the_node_stays() -> None:
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(member(store))
        await stack.enter_async_context(member(store, node_id="d2"))
        store.available = False
        ends = leaving(node)
        assert await left(ends) == [False]
        store.available = True
        await until(ends.done)


async def test_it_stays_no_longer_than_it_may() -> None:
    store, patient = MemoryStore(), [True]
    async with member(store) as node:
        ends = leaving(node, lambda: patient[0])
        assert await left(ends) == [False]
        patient.clear()
        patient.append(False)
        await until(ends.done)


async def test_a_newer_process_of_its_name_is_relief() -> None:
    store = MemoryStore()
    async with member(store) as node:
        ends = leaving(node)
        assert await left(ends) == [False]
        await store.announce(replace(LEASE, epoch=2))
        await until(ends.done)


async def test_a_node_steps_back_only_while_another_does_its_work_and_nobody_else_leaves() -> None:
    store = MemoryStore()
    async with member(store) as node:
        assert "the last decode node" in await node.try_leave_role(0.0)
        (own,) = await store.nodes()
        assert not own.leaving, "it works on, and all may count on it"
        async with member(store, node_id="d2"):
            await store.announce(replace(LEASE, node_id="p1", role="prefill", leaving=True))
            assert "another node is changing its role" in await node.try_leave_role(0.0)
            await store.announce(replace(LEASE, node_id="p1", role="prefill", state="draining"))
            assert "another node is changing its role" in await node.try_leave_role(0.0)
            await store.announce(replace(LEASE, node_id="p1", role="prefill", role_s=4.0))
            assert "less than 30 s ago" in await node.try_leave_role(30.0)
            assert await node.try_leave_role(3.0) == ""
            (own,) = [lease for lease in await store.nodes() if lease.node_id == "d1"]
            assert own.leaving
            assert await node.has_substitute()
            assert "about to end" in await node.try_leave_role(0.0)
            node.keep_role()
        assert not await node.has_substitute()


async def test_a_role_keeps_a_node_of_each_fingerprint() -> None:
    """A node of another one forms no pairs with those that stay. It may end, though: a rollout replaces it by those."""
    store, other = MemoryStore(), {"fingerprint": "new"}
    async with member(store) as node, member(store, node_id="d2", **other) as new:
        for each in (node, new):
            assert "the last decode node" in await each.try_leave_role(0.0)
            assert not await each.has_substitute()
        await store.announce(replace(LEASE, node_id="d3", state="draining"))
        async with member(store, node_id="d4", **other):
            assert await new.try_leave_role(0.0) == "", "what leaves another version delays nothing"
            new.keep_role()
            await new.announce()
        ends = leaving(node)
        await until(ends.done)


async def test_of_two_that_step_back_at_once_not_both_do() -> None:
    store = MemoryStore()
    async with member(store) as one, member(store, node_id="d2") as other, member(store, node_id="d3"):
        answers = await asyncio.gather(one.try_leave_role(0.0), other.try_leave_role(0.0))
        assert any(answers)


async def test_nobody_steps_back_without_a_registry() -> None:
    store = MemoryStore()
    async with member(store) as node, member(store, node_id="d2"):
        store.available = False
        assert await node.try_leave_role(0.0)
        assert not await node.has_substitute()
        store.available = True
        assert await node.try_leave_role(0.0) == ""
