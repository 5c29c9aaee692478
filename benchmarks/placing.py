"""Placement alone: what choosing the nodes for one request costs (`python -m benchmarks.placing 100 idle`)."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from placement.place import place
from placement.terms import Demand, NodeView
from protocol.lease import Load, NodeLease, Rates

SECONDS, LIMIT_S = 0.5, 20.0
"""How long choices are repeated, and what one run may take."""
KINDS = ("idle", "loaded")
TOTAL_LEN = 1000


def microseconds(count: int, kind: str) -> float | None:
    """Of one choice among `count` nodes, half of them prefill, that are all alike and `idle`, or `loaded` as if at
    random. In a process of its own; None if it is not done in LIMIT_S."""
    command = [sys.executable, "-m", "benchmarks.placing", str(count), kind]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    except subprocess.TimeoutExpired:
        return None
    return float(done.stdout)


def nodes(count: int, kind: str) -> list[NodeView]:
    """What a router would see of them."""
    source = random.Random(count)
    views = []
    for number in range(count):
        role = ("prefill", "decode")[number % 2]
        busy = source.random() if kind == "loaded" else 0.0
        used = int(busy * 4000)
        lease = NodeLease(
            f"{role}-{number:04}", role, 1, "ready", "http://127.0.0.1:1", "127.0.0.1:2", "same", "m", 8192, 16, 2**19,
            Load(free_blocks=5000 - used, active_blocks=used, total_blocks=5000),
            Rates(prefill_tokens_per_s=4000 * (1 + busy)),
        )  # fmt: skip
        cached = 16 * source.randrange(0, 40) if kind == "loaded" else 0
        views.append(NodeView(lease, cached, int(8000 * busy), int(64 * busy)))
    return views


def main() -> None:
    count, kind = int(sys.argv[1]), sys.argv[2]
    views, demand = nodes(count, kind), Demand(TOTAL_LEN)
    turns, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < SECONDS or turns == 0:
        place(demand, views)
        turns += 1
    print(1e6 * passed / turns)


if __name__ == "__main__":
    main()
