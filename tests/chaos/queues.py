"""What waits in an engine, a few times a second, beside its spans: why a request that has no blocks has none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvferry.protocol.layout import blocks_for

EVERY_S = 0.25


def log_queues(path: Path, engine: Callable[[], Any]) -> None:
    """Append a line for each look at the engine, which is None until there is one; from a thread of its own."""
    threading.Thread(target=_look, args=(path, engine), name="queues", daemon=True).start()


def _look(path: Path, engine: Callable[[], Any]) -> None:
    with path.open("a", buffering=1) as file:
        while True:
            time.sleep(EVERY_S)
            if (loop := engine()) is not None and loop.mark is not None:
                loop.submit(lambda made: file.write(json.dumps([time.monotonic(), describe(made)]) + "\n"))


def describe(engine: Any) -> str:
    """Of an engine, on its thread: blocks, and the queue with its head."""
    pool, table, size = engine.pool, engine.request_table, engine.config.block_size
    granted = [request for request in table.holding_blocks if request.grant is not None]
    prompts = [request for request in table.running if not request.decodes]
    told = (
        f"{pool.free_blocks} blocks free, {pool.cached_blocks} cached, "
        f"{sum(len(request.block_ids) for request in granted)} held by {len(granted)} grants; "
        f"{len(table.running) - len(prompts)} streams, {len(prompts)} prompts run; {len(table.waiting)} wait"
    )
    for request in table.waiting[:2]:
        blocks = blocks_for(len(request.token_ids), size)
        told += f", {request.key[0][:8]} for {blocks} (due {request.place[3]:.0f} of {table.shared:.0f})"
    return told


def queues(home: Path, names: set[str], since: float, until: float) -> Iterator[tuple[float, str]]:
    """What these processes logged in that time."""
    for name in names:
        path = home / f"{name}.queues"
        if not path.exists():
            continue
        with path.open() as lines:
            for line in lines:
                if line.endswith("]\n") and since < (entry := json.loads(line))[0] < until:
                    yield entry[0], f"{name}: {entry[1]}"
