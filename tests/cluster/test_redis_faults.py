"""Redis fails under two routers and two nodes, and requests could go to either node: every request is served, and goes
to the node that holds its prefix again within ten seconds, by what Redis says and not by what routers remember."""

from tests.redis_cluster import RedisCluster, redis_cluster
from tests.redis_faults import FAILOVERS, FAULTS
from tests.redis_servers import redis_server, watched

BACK_S = 20.0
"""Twice what is promised."""
LAST = 10
"""Requests after a fault, all but one of which found their prefix: the machine may have been busy."""


async def befalls(cluster: RedisCluster, deed) -> None:
    await cluster.disturbed(8, BACK_S, deed, enough=LAST)
    found = [probe.hit for probe in cluster.since(LAST)]
    assert len(found) == LAST
    assert sum(found) >= LAST - 2
    first, second = ({*router.toy.usable("decode")} for router in cluster.routers)
    assert first == second, "routers agree"
    assert len(first) == 2, "no node is lost"


async def test_prefixes_are_found_again():
    """What else there is, and longer: `make redis-faults`."""
    with redis_server() as server:
        async with redis_cluster(server.url) as cluster:
            for fault in ("killed", "frozen", "full", "evicted"):
                await befalls(cluster, FAULTS[fault](server))


async def test_prefixes_are_found_again_after_a_failover():
    with watched() as watch:
        async with redis_cluster(watch.url) as cluster:
            await befalls(cluster, FAILOVERS["master_killed"](watch))
