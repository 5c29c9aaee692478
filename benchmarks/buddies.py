"""Measures the cost of replicas of running streams, and their benefit when a decode node is killed.

    python -m benchmarks.buddies [--streams 8 --output 256 --long 512 --rounds 3]

Two clusters of a prefill and two decode nodes run, one with buddies and one with --no-buddies, and take turns. First:
output tokens per second of streams that run to their end. Then: one stream whose node is killed when it has --long
tokens; the longest pause that its client sees, and how many tokens were computed again for it."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import servers
from benchmarks.load import complete, random_prompt
from benchmarks.lone_router import kvferry
from benchmarks.subjects import Launch
from benchmarks.table import markdown

VARIANTS = {"with buddies": (), "without": ("--no-buddies",)}
PROMPT = 128
RESTART_S = 60.0
"""Maximum time until a killed node is ready again, in seconds."""


async def rate(server: servers.Server, streams: int, output: int, source: random.Random) -> float:
    """Return the output tokens per second of all streams."""
    began = time.perf_counter()
    await asyncio.gather(*(complete(server.target, random_prompt(source, PROMPT), output) for _ in range(streams)))
    return streams * output / (time.perf_counter() - began)


async def killed(server: servers.Server, output: int, source: random.Random) -> tuple[float, float]:
    """Kill the node of a stream in its middle; return the longest pause in seconds and the tokens computed again."""
    began = time.perf_counter()
    await complete(server.target, random_prompt(source, PROMPT), output)
    taken, before = time.perf_counter() - began, recomputed(server)
    used = {node: servers.cpu_seconds([node]) for node in decodes(server)}
    stream = asyncio.create_task(complete(server.target, random_prompt(source, PROMPT), output))
    await asyncio.sleep(taken / 2)
    max(used, key=lambda node: servers.cpu_seconds([node]) - used[node]).kill()
    done = await stream
    again = recomputed(server) - before
    async with asyncio.timeout(RESTART_S):
        while metric(server.target.url, "kvferry_nodes", "decode", "ready") < len(used):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    return max(b - a for a, b in zip(done.arrivals, done.arrivals[1:], strict=False)), again


def decodes(server: servers.Server) -> list[psutil.Process]:
    return [process for process in server.processes() if "decode" in process.cmdline()]


def recomputed(server: servers.Server) -> float:
    return metric(server.target.url, "kvferry_recovered_tokens_total", "computed")


def metric(url: str, name: str, *labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if set(labels) <= set(sample.labels.values()))


async def measure(clusters: dict[str, servers.Server], options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    rates: dict[str, list[float]] = {way: [] for way in clusters}
    losses: dict[str, list[tuple[float, float]]] = {way: [] for way in clusters}
    for number in range(options.rounds + 1):
        for way in sorted(clusters, reverse=number % 2 == 1):
            rates[way].append(await rate(clusters[way], options.streams, options.output, random.Random(number)))
    for number in range(options.rounds):
        for way in sorted(clusters, reverse=number % 2 == 1):
            losses[way].append(await killed(clusters[way], options.long, random.Random(f"long {number}")))
    return [
        (
            way,
            f"{statistics.median(rates[way][1:]):.0f}",
            f"{statistics.median(pause for pause, _ in losses[way]):.2f} s",
            f"{statistics.median(again for _, again in losses[way]):.0f}",
        )
        for way in clusters
    ]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output", type=int, default=256, help="tokens of each")
    parser.add_argument("--long", type=int, default=1024, help="tokens of the stream whose node is killed")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder, ExitStack() as stack:
        clusters = {}
        for way, flags in VARIANTS.items():
            port = servers.free_port()
            command = (*kvferry(), "serve", "--port", str(port), "--decode", "2", "--kv-cache-gib", "0.3", *flags)
            launch = Launch(command, "/ready?nodes=1")
            clusters[way] = stack.enter_context(servers.running(launch, port, Path(folder) / f"{way}.log"))
        rows = asyncio.run(measure(clusters, options))
    head = ("", f"{options.streams} streams, tokens/s", "pause after a kill", "tokens computed again")
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
