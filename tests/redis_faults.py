"""What can befall Redis, and what it costs two routers and two nodes: `make redis-faults` prints a table of it. Each
deed returns when its fault is over."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tests.redis_cluster import RedisCluster, redis_cluster
from tests.redis_servers import MASTER, RedisServer, Watched, redis_server, watched

AWAY_S = 1.5
"""How long a fault lasts that has a length."""


async def nothing(server: RedisServer) -> None:
    await asyncio.sleep(0)


async def flushed(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


async def killed(server: RedisServer) -> None:
    """And started again, empty."""
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(server.start)


async def frozen(server: RedisServer) -> None:
    server.signal(signal.SIGSTOP)
    await asyncio.sleep(AWAY_S)
    server.signal(signal.SIGCONT)


async def paused(server: RedisServer) -> None:
    with server.client() as client:
        client.client_pause(int(AWAY_S * 1000))
    await asyncio.sleep(AWAY_S)


async def full(server: RedisServer) -> None:
    """Nothing may be added, and nothing is evicted."""
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1000)
        await asyncio.sleep(AWAY_S)
        client.config_set("maxmemory", 0)


async def evicted(server: RedisServer) -> None:
    """Leases and rows, all of them and for a while."""
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "1mb")
        await asyncio.sleep(AWAY_S / 2)
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


async def forbidden(server: RedisServer) -> None:
    """All that is asked is refused: the ACL was changed."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-evalsha")
        await asyncio.sleep(AWAY_S)
        client.execute_command("ACL", "SETUSER", "default", "+evalsha")


async def master_killed(watch: Watched) -> None:
    """It comes back when another has taken its place, and becomes its replica."""
    old = await asyncio.to_thread(lambda: watch.master)
    await asyncio.to_thread(old.kill)
    await _replaced(watch, old)
    await asyncio.to_thread(old.start)


async def master_frozen(watch: Watched) -> None:
    """It wakes up as a master that is none any more."""
    old = await asyncio.to_thread(lambda: watch.master)
    old.signal(signal.SIGSTOP)
    await _replaced(watch, old)
    old.signal(signal.SIGCONT)


async def master_changed(watch: Watched) -> None:
    """By order."""
    old = await asyncio.to_thread(lambda: watch.master)
    with watch.sentinels[0].client() as client:
        await asyncio.to_thread(client.execute_command, "SENTINEL", "FAILOVER", MASTER)
    await _replaced(watch, old)


async def _replaced(watch: Watched, old: RedisServer) -> None:
    async with asyncio.timeout(20):
        while await asyncio.to_thread(lambda: watch.master) is old:  # noqa: ASYNC110 (other processes' state)
            await asyncio.sleep(0.1)


FAULTS: dict[str, Callable[[RedisServer], Awaitable[None]]] = {
    each.__name__: each for each in (nothing, flushed, killed, frozen, paused, full, evicted, forbidden)
}
FAILOVERS: dict[str, Callable[[Watched], Awaitable[None]]] = {
    each.__name__: each for each in (master_killed, master_frozen, master_changed)
}


async def table() -> None:
    """A row per fault, of eight seconds each."""
    print(f"{'fault':16}requests  found  back after  slowest")
    with redis_server() as server:
        async with redis_cluster(server.url) as cluster:
            for name, deed in FAULTS.items():
                await cluster.disturbed(40, 8, deed(server))
                _tell(name, cluster)
    with watched() as watch:
        async with redis_cluster(watch.url) as cluster:
            for name, failover in FAILOVERS.items():
                await cluster.disturbed(40, 8, failover(watch))
                _tell(name, cluster)


def _tell(name: str, cluster: RedisCluster) -> None:
    found = f"{100 * cluster.hits():.0f} %"
    print(
        f"{name:16}{len(cluster.probes):8}{found:>7}{cluster.back_after():10.1f} s{cluster.slowest_s:7.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(asyncio.run(table()))
