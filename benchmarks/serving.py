"""What a cluster on this machine does, measured over its OpenAI streaming API: one table, one command (`make bench`).

Starts `kvferry serve` with the arguments given (default: one prefill and one decode process), measures from outside,
and ends it. Medians; the share of transfer hidden behind compute comes from the prefill nodes' metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil

VOCABULARY = range(1000, 40000)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one streamed completion: seconds to the first token, seconds between the first and the last, output tokens."""

    first_s: float
    rest_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster and how long it took to its ready line."""

    url: str
    model: str
    ready_s: float
    pid: int


@contextmanager
def cluster(args: list[str]) -> Iterator[Cluster]:
    """`kvferry serve --port 0` with more arguments, ended at exit."""
    began = time.monotonic()
    command = [sys.executable, "-m", "cli.main", "serve", "--port", "0", "--log-level", "warning", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)/v1", process.stdout.readline())
        if found is None:
            raise SystemExit("the cluster did not start")
        ready_s = time.monotonic() - began
        model = httpx.get(f"{found.group(1)}/v1/models").json()["data"][0]["id"]
        yield Cluster(found.group(1), model, ready_s, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(15)


def random_prompt(count: int) -> list[int]:
    return random.choices(VOCABULARY, k=count)


def complete(target: Cluster, prompt: list[int], max_tokens: int) -> Timing:
    """Stream one completion of exactly `max_tokens` tokens."""
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    first = last = 0.0
    tokens = 0
    with httpx.stream("POST", f"{target.url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            last = time.monotonic()
            first = first or last
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return Timing(first - began, last - first, tokens)


def node_metrics(target: Cluster, name: str) -> float:
    """Sum of a metric over the worker processes of the cluster, found among its child processes."""
    total = 0.0
    for child in psutil.Process(target.pid).children(recursive=True):
        if not {"prefill", "decode"} & set(child.cmdline()):
            continue
        for connection in child.net_connections():
            if connection.status == psutil.CONN_LISTEN:
                total += _sum_of(f"http://127.0.0.1:{connection.laddr.port}/metrics", name)
    return total


def _sum_of(url: str, name: str) -> float:
    try:
        text = httpx.get(url, timeout=2).text
    except httpx.HTTPError:
        return 0.0
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def measure(target: Cluster, rounds: int) -> list[tuple[str, str]]:
    """Rows of the table."""
    complete(target, random_prompt(64), 8)
    single = [complete(target, random_prompt(128), 128) for _ in range(rounds)]
    shipped = (
        node_metrics(target, "kvferry_ship_seconds_total"),
        node_metrics(target, "kvferry_ship_exposed_seconds_total"),
    )
    cold, cached, computed = [], [], []
    for _ in range(rounds):
        prompt = random_prompt(1024)
        cold.append(complete(target, prompt, 4).first_s)
        time.sleep(0.3)
        cached.append(complete(target, prompt, 4).first_s)
    for key in ("kvferry_ship_seconds_total", "kvferry_ship_exposed_seconds_total"):
        computed.append(node_metrics(target, key))
    ship_s, exposed_s = computed[0] - shipped[0], computed[1] - shipped[1]
    hidden = f"{100 * (1 - exposed_s / ship_s):.0f} %" if ship_s > 0 else "no ships"
    resident = sum(p.memory_info().rss for p in psutil.Process(target.pid).children(recursive=True)) / 2**30
    return [
        ("seconds to ready", f"{target.ready_s:.1f} s"),
        (
            "one stream, 128 in / 128 out",
            f"{statistics.median((t.tokens - 1) / t.rest_s for t in single):.1f} tokens/s",
        ),
        ("time to first token, 1,024 tokens, cold", f"{1000 * statistics.median(cold):.0f} ms"),
        ("time to first token, 1,024 tokens, cached", f"{1000 * statistics.median(cached):.0f} ms"),
        ("share of transfer hidden behind compute", hidden),
        ("resident memory of all processes", f"{resident:.1f} GiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each figure")
    options, serve_args = parser.parse_known_args()
    with cluster(serve_args) as target:
        for name, figure in measure(target, options.rounds):
            print(f"{name:<45} {figure}")


if __name__ == "__main__":
    main()
