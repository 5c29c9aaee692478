"""Routers of one process that claim each other's work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.router_leases import OwnedTask
from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.errors import Overloaded

PERIOD_S, LEASE_S = 0.05, 0.15


class Router:
    """One router process that notes what it claimed."""

    def __init__(self, leases: MemoryRouterLeases) -> None:
        self.own = RouterOwnership(leases, period_s=PERIOD_S)
        self.claimed: list[str] = []
        self.own.take_over("batch", self._go_on)

    async def _go_on(self, name: str) -> None:
        self.claimed.append(name)


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions have no event
            await asyncio.sleep(0.01)


async def test_the_work_of_a_dead_router_is_claimed_once_each() -> None:
    leases = MemoryRouterLeases(lease_s=LEASE_S)
    dead, routers = Router(leases), [Router(leases) for _ in range(3)]
    names = [f"b{number}" for number in range(20)]
    await leases.renew(dead.own.owner)
    for name in names:
        assert await dead.own.take("batch", name, 60)
    async with contextlib.AsyncExitStack() as stack:
        for router in routers:
            await stack.enter_async_context(router.own.running())
        await asyncio.sleep(LEASE_S / 2)
        assert not any(router.claimed for router in routers), "its lease has not lapsed"
        await until(lambda: sum(len(router.claimed) for router in routers) == len(names))
        await asyncio.sleep(3 * PERIOD_S)
        assert sorted(name for router in routers for name in router.claimed) == sorted(names)
    assert not await dead.own.holds("batch", "b0")


async def test_a_draining_router_gives_up_its_work_and_claims_none() -> None:
    leases = MemoryRouterLeases(lease_s=LEASE_S)
    leaving, staying = Router(leases), Router(leases)
    async with leaving.own.running(), staying.own.running():
        await leaving.own.take("batch", "a", 60)
        leaving.own.drain()
        assert await leaving.own.release("batch", "a")
        await until(lambda: staying.claimed == ["a"])
        await staying.own.release("batch", "a")
        await until(lambda: staying.claimed == ["a", "a"])
    assert leaving.claimed == []


async def test_the_end_of_a_process_ends_its_lease_at_once() -> None:
    leases = MemoryRouterLeases(lease_s=60)
    leaving, staying = Router(leases), Router(leases)
    async with staying.own.running():
        async with leaving.own.running():
            await leaving.own.take("batch", "a", 60)
        await until(lambda: staying.claimed == ["a"])


async def test_work_that_cannot_go_on_now_is_tried_again() -> None:
    leases = MemoryRouterLeases(lease_s=LEASE_S)
    tries: list[str] = []

    async def refuse_first(name: str) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise Overloaded("full")

    own = RouterOwnership(leases, period_s=PERIOD_S)
    own.take_over("response", refuse_first)
    await leases.take("gone", OwnedTask("response", "a"), 60)
    async with own.running():
        await until(lambda: len(tries) == 3)
        await asyncio.sleep(3 * PERIOD_S)
        assert tries == ["a"] * 3
        assert await own.holds("response", "a")


async def test_kinds_that_nobody_here_takes_over_stay() -> None:
    leases = MemoryRouterLeases(lease_s=LEASE_S)
    router = Router(leases)
    await leases.take("gone", OwnedTask("response", "a"), 60)
    async with router.own.running():
        await asyncio.sleep(4 * PERIOD_S)
    assert await leases.orphans() == [OwnedTask("response", "a")]


async def test_without_the_store_nothing_is_claimed_and_later_it_is() -> None:
    leases = MemoryRouterLeases(lease_s=LEASE_S)
    router = Router(leases)
    await leases.take("gone", OwnedTask("batch", "a"), 60)
    leases.available = False
    async with router.own.running():
        await asyncio.sleep(4 * PERIOD_S)
        assert router.claimed == []
        leases.available = True
        await until(lambda: router.claimed == ["a"])
