"""Replays eviction policies over traces: which idle blocks should be evicted first from a full pool?

One pool, the engine's own, takes each prompt on arrival and holds it for 0.3 s, so all orders see the same requests at
the same times. One processor computes the missing tokens in order of arrival: time to first token is the
time in its queue and of its computation. `oracle` knows all future requests and evicts the block that is needed last
(Belady). `way` is the share of the difference in tokens found between SLRU and the oracle that an order gains.

    python -m benchmarks.eviction [workload or trace file in Mooncake's format ...]
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, quantiles

from benchmarks.known_pauses import KNOWN, KnownPauses, Pauses
from kvferry.engine.cache_use import CacheUse
from kvferry.simulate.compare import CASES
from kvferry.simulate.eviction import EVICTIONS, KnownBlocks
from kvferry.simulate.machine import LARGE
from kvferry.simulate.memory import Memory
from kvferry.simulate.mooncake import read_trace
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams
from kvferry.simulate.workloads import WORKLOADS

ORACLE, SLRU = "oracle", "slru"
ORDERS = ("lru", *(name for name in EVICTIONS if name != "lru"), ORACLE)
COUNT, SEEDS, NODES = 1000, (0, 1, 2), 8
SIZES, TRACE_SIZES = (1500, 3000, 6000), (12_000, 24_000, 48_000)
"""Blocks of a pool, for workloads and for trace files."""
STEP_S, HELD_S = 0.02, 0.3
"""Seconds of each output token, and seconds for which a prompt's blocks are held."""
Event = tuple[float, int, bool]
"""Time in seconds, number of a request, and whether it leaves."""


def events(trace: Sequence[TraceRequest]) -> list[Event]:
    """Return arrivals and departures in order; a client sends its next request some time after its answer."""
    followers: dict[int, list[TraceRequest]] = {}
    coming: list[Event] = []
    for ask in trace:
        if ask.after < 0:
            coming.append((ask.at, ask.number, False))
        else:
            followers.setdefault(ask.after, []).append(ask)
    heapq.heapify(coming)
    by_number, found = {ask.number: ask for ask in trace}, list[Event]()
    while coming:
        now, number, leaves = event = heapq.heappop(coming)
        found.append(event)
        if not leaves:
            heapq.heappush(coming, (now + HELD_S, number, True))
            answered = now + max(HELD_S, by_number[number].output_len * STEP_S)
            for each in followers.get(number, ()):
                heapq.heappush(coming, (answered + each.at, each.number, False))
    return found


def wanted(ask: TraceRequest, block_size: int) -> tuple[bytes, ...]:
    """Return the hashes of the blocks that a prompt may reuse; its last token is always computed."""
    return ask.hashes[: (ask.prompt_len - 1) // block_size]


class Oracle(KnownBlocks):
    """Evicts the leaf that is needed last or never (Belady, 1966)."""

    def __init__(
        self, pool: Memory, trace: Sequence[TraceRequest], order: Sequence[Event], clock: Callable[[], float], size: int
    ) -> None:
        super().__init__(pool)
        self._clock = clock
        self._needed: dict[bytes, list[float]] = {}
        asks = {ask.number: ask for ask in trace}
        for now, number, leaves in reversed(order):
            for block_hash in () if leaves else wanted(asks[number], size):
                self._needed.setdefault(block_hash, []).append(now)
        self._heap: list[tuple[float, int, bytes]] = []

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Learn nothing."""

    def put(self, block_id: int, *, leaf: bool) -> None:
        self._idle[block_id] = None
        if leaf:
            self.became_leaf(block_id)

    def became_leaf(self, block_id: int) -> None:
        if block_id in self._idle:
            block_hash = self._hash(block_id)
            heapq.heappush(self._heap, (-self._next(block_hash), block_id, block_hash))

    def pop(self) -> int:
        while True:
            when, block_id, block_hash = heapq.heappop(self._heap)
            if block_id not in self._idle or self._hash(block_id) != block_hash or not self._leaf(block_id):
                continue
            if -when != self._next(block_hash):
                self.became_leaf(block_id)  # that use is in the past
                continue
            del self._idle[block_id]
            return block_id

    def _next(self, block_hash: bytes) -> float:
        times = self._needed.get(block_hash, [])
        while times and times[-1] <= self._clock():
            times.pop()
        return times[-1] if times else float("inf")


class Replay:
    """Replay of a trace through one pool. pauses: true distributions, for the order KNOWN.

    found, prompts: tokens; saved_s, whole_s: seconds of computing; pool_s: processor seconds spent in the pool's code;
    ttft_s: of each request."""

    def __init__(
        self, order: str, blocks: int, trace: Sequence[TraceRequest], block_size: int = LARGE.block_size,
        pauses: Pauses | None = None,
    ) -> None:  # fmt: skip
        self._now = self._free = 0.0
        self._block_size = block_size
        played = events(trace)
        asks = {ask.number: ask for ask in trace}
        known = EVICTIONS[0] if order in (ORACLE, KNOWN) else order
        self.pool = Memory(blocks, known, lambda: self._now)
        if order == ORACLE:
            self.pool.idle = Oracle(self.pool, trace, played, lambda: self._now, block_size)
        elif pauses is not None:
            self.pool.idle = KnownPauses(self.pool, asks, lambda: self._now, pauses)
        self.found = self.prompts = self.skipped = 0
        self.saved_s = self.whole_s = self.pool_s = 0.0
        self.ttft_s: list[float] = []
        for self._now, number, leaves in played:
            if leaves:
                began = time.process_time()
                self.pool.release_owner(number)
                self.pool_s += time.process_time() - began
            else:
                self._take(asks[number])
        self.pool.check_integrity()

    def _take(self, ask: TraceRequest) -> None:
        size, began = self._block_size, time.process_time()
        blocks, use = -(-(ask.prompt_len + ask.output_len) // size), ask.cache_use
        use.request_id = str(ask.number)
        here = self.pool.take(ask.number, wanted(ask, size), blocks, cache_use=use)
        if here is not None:
            self.pool.fill(ask.number, ask.hashes)
        self.pool_s += time.process_time() - began
        self.skipped += here is None
        found = (here or 0) * size
        self.found += found
        self.prompts += ask.prompt_len
        whole_s, saved_s = LARGE.compute_s(0, ask.prompt_len), LARGE.compute_s(0, found)
        self.whole_s += whole_s
        self.saved_s += saved_s
        self._free = max(self._now, self._free) + whole_s - saved_s
        self.ttft_s.append(self._free - self._now)

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens found."""
        return self.found / self.prompts


def workload(name: str, seed: int) -> list[TraceRequest]:
    """Return a workload at the load of one node of the simulator's cluster, or a trace file."""
    if name not in CASES:
        return read_trace(Path(name), LARGE)
    case = CASES[name]
    return WORKLOADS[case.workload](TraceParams(COUNT, case.rate / NODES, seed, LARGE.block_size))


def row(name: str, order: str, blocks: int, runs: Sequence[Replay], ways: Sequence[float]) -> str:
    """Return a line of the table: means over the seeds."""
    cuts = [quantiles(run.ttft_s, n=100, method="inclusive") for run in runs]
    figures = (
        f"{mean(100 * run.hit_rate for run in runs):.1f} %",
        f"{mean(100 * run.saved_s / run.whole_s for run in runs):.1f} %",
        f"{100 * mean(ways):.0f} % ({100 * min(ways):.0f} … {100 * max(ways):.0f})",
        f"{mean(cut[49] for cut in cuts):.2f}, {mean(cut[98] for cut in cuts):.2f}",
        f"{mean(run.pool_s for run in runs):.2f}",
    )
    return f"| {Path(name).name} | {blocks} | {order} | " + " | ".join(figures) + " |"


def main(chosen: Sequence[str]) -> None:
    names = chosen or [name for name, case in CASES.items() if not case.losses]
    print(
        "| workload | blocks | order | tokens found | seconds saved | way | TTFT p50, p99 in s | seconds in the pool |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        traces = [workload(name, seed) for seed in (SEEDS if name in CASES else SEEDS[:1])]
        for blocks in SIZES if name in CASES else TRACE_SIZES:
            runs = {order: [Replay(order, blocks, trace) for trace in traces] for order in ORDERS}
            for order in ORDERS:
                ends = zip(runs[order], runs[SLRU], runs[ORACLE], strict=True)
                ways = [(r.found - s.found) / max(1, o.found - s.found) for r, s, o in ends]
                print(row(name, order, blocks, runs[order], ways), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
