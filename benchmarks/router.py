"""Measures the router alone, in front of mock nodes that answer at once (`make bench-router`).

    python -m benchmarks.router [--rounds 3 --only requests,streams128] [--vllm-router COMMAND]

The router is a process of its own, started by its command and called over HTTP; CPU is user and system time of that
process alone. It shares the cores with mocks, Valkey and load, so throughput per core follows from CPU, and wall times
mean little. Figures are medians over the rounds, in which all rows take turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import index_traffic, placing, router_limits, servers
from benchmarks.load import LoadError
from benchmarks.lone_router import lone_router
from benchmarks.peer_router import peer_router
from benchmarks.router_rows import ROWS, Bench, Row, Sample, words_per_token
from benchmarks.workloads import percentile

WARM_UP = 0.2
"""Share of a row's requests that run first and do not count."""
OURS, PEER = "kvferry", "vllm-router"

SubjectRow = tuple[str, Row]
"""Subject and its row."""


def python_speed_ms() -> float:
    """Return CPU milliseconds of a fixed piece of Python, to compare the machine's speed between runs."""
    body, began = {"prompt": "ten words", "tokens": list(range(100))}, time.process_time()
    for _ in range(2000):
        json.loads(json.dumps(body))
    return 1e3 * (time.process_time() - began)


def report(samples: dict[SubjectRow, list[Sample]], python_ms: Sequence[float]) -> str:
    """Return a Markdown table of medians, with the least of the CPU figures.

    Other load on the machine only adds to CPU figures."""
    lines = [
        "| | goal | a core does, per s | CPU ms a request (least) | CPU µs a token (least) "
        "| first token later by, p50 | p99 | loop late by, p99 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (who, row), turns in samples.items():
        title = row.title if who == OURS else f"{who}: {row.title}"
        lines.append(f"| {title} | {row.goal} | {' | '.join(_cells(row, turns))} |")
    lines.append(
        f"\nA fixed piece of Python took {statistics.median(python_ms):.1f} ms of CPU in the same rounds, "
        f"{min(python_ms):.1f} at least."
    )
    return "\n".join(lines)


def _cells(row: Row, turns: Sequence[Sample]) -> tuple[str, ...]:
    firsts = [first_s for turn in turns for first_s in turn.first_s]
    requests = [turn.cpu_s / row.requests for turn in turns]
    tokens = [turn.cpu_s / turn.tokens for turn in turns]
    by_request, by_token = row.shows == "requests", row.shows == "tokens"
    return (
        f"{1 / statistics.median(requests):,.0f} requests" if by_request else ""
        f"{1 / statistics.median(tokens):,.0f} tokens" if by_token else "",
        f"{1e3 * statistics.median(requests):.2f} ({1e3 * min(requests):.2f})" if by_request else "",
        f"{1e6 * statistics.median(tokens):.1f} ({1e6 * min(tokens):.1f})" if by_token else "",
        f"{1e3 * statistics.median(firsts):.2f} ms",
        f"{1e3 * percentile(firsts, 0.99):.2f} ms" if len(firsts) >= 100 else "",
        lag_p99([turn.lag for turn in turns]),
    )  # fmt: skip


def lag_p99(lags: Sequence[dict[float, int]]) -> str:
    """Return the bounds of the 99th percentile of the event loop's lag."""
    counts: dict[float, int] = defaultdict(int)
    for bound, count in (pair for lag in lags for pair in lag.items()):
        counts[bound] += count
    total = max(counts.values(), default=0)
    for lower, upper in pairwise((0.0, *sorted(counts))):
        if total and counts[upper] >= 0.99 * total:
            return f"{1e3 * lower:g} to {1e3 * upper:g} ms"
    return ""


async def measure(rows: Sequence[Row], rounds: int, peer: Path | None = None) -> str:
    """Run the rows `rounds` times after a warm-up; return the table."""
    samples, python_ms = defaultdict[SubjectRow, list[Sample]](list), []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        router = await stack.enter_async_context(lone_router(folder))
        own = Bench(router, await words_per_token(router.target))
        turns = {(OURS, row): own for row in rows}
        if peer and any(row.peer for row in rows):
            other = replace(own, router=await stack.enter_async_context(peer_router(peer, folder)))
            turns |= {(PEER, row): other for row in rows if row.peer}
        for (who, row), bench in turns.items():
            few = replace(row, requests=max(row.at_once, int(WARM_UP * row.requests)))
            await bench.sample(few, random.Random(f"warm-up {who} {row.name}"))
        for number in range(rounds):
            for (who, row), bench in turns.items():
                python_ms.append(python_speed_ms())
                samples[who, row].append(await bench.sample(row, random.Random(f"{row.name} {number}")))
    return report(samples, python_ms)


ALONE: dict[str, Callable[[], Coroutine[Any, Any, str]]] = {
    "limits": router_limits.report, "placement": placing.report, "index": index_traffic.report
}  # fmt: skip
"""Measurements without requests."""


def main() -> None:
    names = [*(row.name for row in ROWS), *ALONE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--vllm-router", default=shutil.which(PEER), help="its command; skipped if it is not installed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    only = options.only.split(",")
    if unknown := set(only) - set(names):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        if rows := [row for row in ROWS if row.name in only]:
            peer = Path(options.vllm_router) if options.vllm_router else None
            print(asyncio.run(measure(rows, options.rounds, peer)), flush=True)
        for name in (name for name in ALONE if name in only):
            print(f"\n{asyncio.run(ALONE[name]())}", flush=True)
    except (LoadError, servers.StartError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
