"""Sentinels that name different masters, or let nobody in. Each watches a server of its own: so it is for those that a
line parts, of which one goes on naming a master that the others have replaced."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.cluster_state import redis_pool
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.registry import Announced
from kvferry.protocol.errors import RegistryRefuses, RegistryUnavailable
from kvferry.protocol.lease import NodeLease
from tests.redis_servers import LOOPBACK, MASTER, RedisServer, free_ports

LEASE = NodeLease("a", "decode", 5, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)
KEY = "kvferry:test:node:a"
PASSWORD = "hunter2"
Start = Callable[..., RedisServer]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a server, or a Sentinel with this configuration."""
    with contextlib.ExitStack() as stack:

        def started(*conf: str) -> RedisServer:
            server = RedisServer(free_ports(1)[0], *(["--sentinel"] if conf else []), conf=conf)
            stack.callback(server.close)
            return server

        yield started


@pytest.fixture(scope="module")
def former(start: Start) -> RedisServer:
    return start()


@pytest.fixture(scope="module")
def master(start: Start) -> RedisServer:
    return start()


@pytest.fixture(autouse=True)
def empty(former: RedisServer, master: RedisServer) -> None:
    for server in (former, master):
        with server.client() as client:
            client.flushall()


def naming(server: RedisServer, epoch: int) -> tuple[str, str]:
    """What makes a Sentinel name this master since this epoch."""
    return f"sentinel monitor {MASTER} {LOOPBACK} {server.port} 2", f"sentinel config-epoch {MASTER} {epoch}"


def holds(server: RedisServer) -> bool:
    with server.client() as client:
        return bool(client.exists(KEY))


@contextlib.asynccontextmanager
async def behind(*sentinels: RedisServer, more: str = "", **options: Any):
    where = ",".join(f"{LOOPBACK}:{each.port}" for each in sentinels)
    store = RedisStore(f"redis+sentinel://{where}/{MASTER}{more}", "test", **options)
    yield store
    await store.close()


async def test_of_two_masters_the_one_that_was_made_last_counts(start, former, master):
    """The Sentinel beside the former master is cut off with it and names it on, and it is asked first."""
    cut_off = start(*naming(former, 1))
    others = [start(*naming(master, 7)) for _ in range(2)]
    async with behind(cut_off, *others) as store:
        for _ in range(3):
            await store.announce(LEASE)
            assert (holds(former), holds(master)) == (False, True)
    async with behind(cut_off) as store:
        await store.announce(LEASE)
        assert holds(former), "nobody knows better"


async def test_a_dead_or_frozen_sentinel_costs_nothing_while_most_answer(start, master):
    sentinels = [start(*naming(master, 7)) for _ in range(3)]
    sentinels[0].signal(19)
    async with behind(*sentinels) as store:
        began = time.monotonic()
        await store.announce(LEASE)
        assert time.monotonic() - began < 0.45
        sentinels[2].kill()
        await asyncio.gather(*(store.announce(LEASE) for _ in range(4)))
        assert time.monotonic() - began < 2.5
    sentinels[0].kill()


async def test_a_connection_in_use_while_the_master_changes_is_left_as_well(start, former, master, monkeypatch):
    """It comes back to the pool when all others go to the new master already."""
    monkeypatch.setattr(redis_pool, "QUERY_S", 60.0)
    sentinel = start(*naming(former, 0))
    async with behind(sentinel) as store:
        waiting = asyncio.create_task(store._client.blpop("nobody pushes", 0.5))
        await asyncio.sleep(0.2)
        with sentinel.client() as client:
            client.execute_command("SENTINEL", "REMOVE", MASTER)
            client.execute_command("SENTINEL", "MONITOR", MASTER, LOOPBACK, master.port, 1)
        assert await store.announce(LEASE) is Announced.CREATED
        assert holds(master)
        await waiting
        for _ in range(3):
            await asyncio.gather(*(store.announce(LEASE) for _ in range(3)))
            assert (holds(former), holds(master)) == (False, True)


@pytest.mark.parametrize("given", ["?sentinel_password=wrong", "?sentinel_username=x&sentinel_password=wrong", ""])
async def test_a_sentinel_that_lets_nobody_in_is_told_at_the_start(start, master, given):
    sentinel = start(*naming(master, 0), f"requirepass {PASSWORD}")
    async with behind(sentinel, more=given) as store:
        with pytest.raises(RegistryRefuses, match="Sentinel") as caught:
            await store.check()
        assert "wrong" not in caught.value.message
        with pytest.raises(RegistryUnavailable, match="Sentinel"):
            await store.announce(LEASE)
    async with behind(sentinel, more=f"?sentinel_password={PASSWORD}") as store:
        assert await store.check()


async def test_sentinels_that_know_no_such_master_are_waited_for(start, master):
    sentinel = start(*naming(master, 0))
    async with behind(sentinel, more="2") as store:
        with pytest.raises(RegistryUnavailable, match=f"{MASTER}2"):
            await store.check()


def state(port: int, epoch: int, *flags: str) -> redis_pool.State:
    told = {f"is_{name}": flag in flags for name, flag in (("sdown", "s_down"), ("odown", "o_down"))}
    return told | {"ip": "h", "port": port, "config-epoch": epoch, "is_master": True, "flags": ",".join(flags)}


@pytest.mark.parametrize(
    ("states", "port"),
    [
        ([], None),
        ([state(1, 1)], 1),
        ([state(1, 1, "s_down")], None),
        ([state(1, 1, "s_down"), state(1, 1)], 1),
        ([state(1, 1), state(2, 2), state(1, 1)], 2),
        ([state(1, 1), state(2, 2, "s_down")], None),
        ([state(1, 2, "failover_in_progress"), state(2, 2)], 2),
        ([state(1, 2, "s_down", "failover_in_progress"), state(2, 2)], 2),
        ([state(1, 2, "failover_in_progress")], 1),
    ],
)
def test_the_newest_master_counts_if_somebody_has_it_up(states, port):
    assert redis_pool.newest(states) == (port and ("h", port))
