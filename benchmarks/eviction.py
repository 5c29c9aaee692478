"""Replays orders of eviction over the seeded workloads: which idle blocks should leave a full pool first?

One pool, the engine's own, takes each prompt on arrival and holds it for 0.3 s, as a node that is never late would. All
orders therefore see the same requests in the same order. For LRU, the table shows the share of prompt tokens found in
the cache and the share of compute seconds saved, attention included. For the others, it shows the seconds saved against
LRU's, in percent: the mean of the seeds, and the least and the most of any.

    python -m benchmarks.eviction [workload ...]
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Sequence
from statistics import mean

from kvferry.simulate.compare import CASES
from kvferry.simulate.eviction import EVICTIONS
from kvferry.simulate.machine import LARGE
from kvferry.simulate.memory import Memory
from kvferry.simulate.scenario import Scenario
from kvferry.simulate.workloads import WORKLOADS, Asked

ORDERS = ("lru", *(name for name in EVICTIONS if name != "lru"))
COUNT, SEEDS, NODES = 1000, (0, 1, 2), 8
SIZES = (1500, 3000, 6000)
"""Blocks of a pool."""
STEP_S, HELD_S = 0.02, 0.3
"""Seconds of each output token, and seconds for which a prompt's blocks are held."""


class Replay:
    """A trace through one pool.

    found, prompts: tokens; saved_s, whole_s: seconds of computing; pool_s: real seconds spent in the pool's code."""

    def __init__(self, eviction: str, blocks: int) -> None:
        self.pool = Memory(blocks, eviction)
        self.found, self.prompts, self.skipped = 0, 0, 0
        self.saved_s, self.whole_s, self.pool_s = 0.0, 0.0, 0.0

    def play(self, trace: Sequence[Scenario]) -> None:
        followers: dict[int, list[Scenario]] = {}
        coming: list[tuple[float, int, int]] = []
        """(time, request, True on arrival and False on departure); clients that wait ask on their own clock"""
        for ask in trace:
            if ask.after < 0:
                coming.append((ask.at, ask.number, 0))
            else:
                followers.setdefault(ask.after, []).append(ask)
        heapq.heapify(coming)
        by_number = {ask.number: ask for ask in trace}
        while coming:
            now, number, goes = heapq.heappop(coming)
            ask = by_number[number]
            if not goes:
                self._take(ask)
                heapq.heappush(coming, (now + HELD_S, number, 1))
                for each in followers.get(number, ()):
                    heapq.heappush(coming, (now + max(HELD_S, ask.output_len * STEP_S) + each.at, each.number, 0))
                continue
            began = time.perf_counter()
            self.pool.give(number)
            self.pool_s += time.perf_counter() - began

    def _take(self, ask: Scenario) -> None:
        size = LARGE.block_size
        began = time.perf_counter()
        hashes = ask.hashes[: (ask.prompt_len - 1) // size]
        here = self.pool.take(ask.number, hashes, -(-(ask.prompt_len + ask.output_len) // size))
        if here is not None:
            self.pool.fill(ask.number, ask.hashes)
        self.pool_s += time.perf_counter() - began
        self.skipped += here is None
        found = (here or 0) * size
        self.found += found
        self.prompts += ask.prompt_len
        self.saved_s += LARGE.compute_s(0, found)
        self.whole_s += LARGE.compute_s(0, ask.prompt_len)


def replayed(workload: str, eviction: str, blocks: int, seed: int) -> Replay:
    """Replay a workload at the load of one node of the simulator's cluster."""
    case = CASES[workload]
    replay = Replay(eviction, blocks)
    replay.play(WORKLOADS[case.workload](Asked(COUNT, case.rate / NODES, seed, LARGE.block_size)))
    replay.pool.check_integrity()
    return replay


def main(chosen: Sequence[str]) -> None:
    workloads = chosen or [name for name, case in CASES.items() if not case.losses]
    print("| workload | blocks | LRU: tokens found, seconds saved | " + " | ".join(ORDERS[1:]) + " |")
    print("| --- | --- | --- |" + " --- |" * (len(ORDERS) - 1))
    cost = dict.fromkeys(ORDERS, 0.0)
    for workload in workloads:
        for blocks in SIZES:
            runs = {name: [replayed(workload, name, blocks, seed) for seed in SEEDS] for name in ORDERS}
            for name in ORDERS:
                cost[name] += sum(run.pool_s for run in runs[name])
            lru = runs["lru"]
            row = [f"{mean(100 * r.found / r.prompts for r in lru):.1f} %, "
                   f"{mean(100 * r.saved_s / r.whole_s for r in lru):.1f} %"]  # fmt: skip
            for name in ORDERS[1:]:
                gains = [100 * (r.saved_s / max(o.saved_s, 1e-9) - 1) if o.saved_s else 0.0
                         for r, o in zip(runs[name], lru, strict=True)]  # fmt: skip
                row.append(f"{mean(gains):+.1f} ({min(gains):+.1f} … {max(gains):+.1f})")
            skipped = f" ({lru[0].skipped} without room)" if lru[0].skipped else ""
            print(f"| {workload} | {blocks}{skipped} | " + " | ".join(row) + " |", flush=True)
    print("\nSeconds in the pool: " + ", ".join(f"{name} {cost[name]:.1f}" for name in ORDERS))


if __name__ == "__main__":
    main(sys.argv[1:])
