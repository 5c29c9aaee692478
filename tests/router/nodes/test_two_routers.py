"""Two routers that never talk agree through what nodes tell the registry."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from benchmarks import placing
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import Demand
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.model_cluster import ModelCluster
from kvferry.router.nodes.reservations import LEASE_LAG_POLLS


async def router(store: MemoryStore) -> ModelCluster:
    whole = RouterCluster(store, store, RouterMetrics())
    model = whole.pool(ModelName("m"))
    await whole.nodes.refresh()
    await whole.close()
    for entry in whole.nodes.entries.values():
        entry.opened()
    return model


def serve(model: ModelCluster, running: Counter[str], node: str = "") -> str:
    """Place a request, on `node` if one is named, and book it: it runs for ever."""
    chosen = model.place(Demand(100), {}).decode
    assert chosen
    name = node or chosen.node_id
    model.nodes.entries[name, 1].reserve(100, 7, lambda error: None).settle()
    running[name] += 1
    return name


async def renewed(store: MemoryStore, leases: list[NodeLease], running: Counter[str], *models: ModelCluster) -> None:
    """Nodes tell what runs there, until no lease can be older than that."""
    for lease in leases:
        await store.announce(replace(lease, load=replace(lease.load, running_requests=running[lease.node_id])))
    for _ in range(LEASE_LAG_POLLS + 1):
        for model in models:
            await model.nodes.refresh()


async def test_one_keeps_away_from_where_the_other_sends() -> None:
    store, running = MemoryStore(), Counter[str]()
    leases = [placing.lease(number, "idle", random.Random(0)) for number in (1, 3)]
    for lease in leases:
        await store.announce(lease)
    first, second = await router(store), await router(store)
    full, free = (lease.node_id for lease in leases)
    for _ in range(20):
        serve(first, running, full)
    await renewed(store, leases, running, first, second)
    assert {serve(second, running) for _ in range(15)} == {free}
    await renewed(store, leases, running, first, second)
    assert serve(first, running) == free, "which has 15 requests of the other router, and the full one 20 of our own"


async def test_together_they_load_nodes_evenly() -> None:
    store, running = MemoryStore(), Counter[str]()
    leases = [placing.lease(number, "idle", random.Random(0)) for number in (1, 3, 5, 7)]
    for lease in leases:
        await store.announce(lease)
    first, second = await router(store), await router(store)
    for _ in range(12):
        for model in (first, second, first):
            serve(model, running)
        await renewed(store, leases, running, first, second)
    assert sum(running.values()) == 36
    assert max(running.values()) - min(running.values()) <= 3, "what was placed since nodes last told"
