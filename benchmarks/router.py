"""Measures the router alone, in front of mock nodes that answer at once (`make bench-router`).

    python -m benchmarks.router [--rounds 3 --only short,stream]

The router is a process of its own, started by its command and spoken to over HTTP; CPU is user and system time of that
process and of nothing else. It shares the cores with mocks, Valkey and load, so requests per second say less than CPU.
Figures are medians over the rounds, in which all rows take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from benchmarks import placing, servers
from benchmarks.load import Completion, Connection, LoadError, Target, connected, post
from benchmarks.lone_router import LoneRouter, lone_router
from benchmarks.mock_nodes import STRIDE, WORDS
from benchmarks.workloads import percentile
from protocol.messages import Job, PrefillRequest
from protocol.sampling import SamplingParams
from protocol.wire import pack
from protocol.work import Generate

PROSE = Path(__file__).with_name("prose.txt")
WARM_UP = 0.2
"""Part of a row's requests that come first and do not count."""


@dataclass(frozen=True, slots=True)
class Row:
    """`requests` requests, `at_once` of them at a time, each with a prompt of about `prompt` tokens (0: ten words) and
    exactly `out` output tokens, `pace_us` apart."""

    name: str
    title: str
    at_once: int
    prompt: int
    out: int
    requests: int
    pace_us: int = 0


ROWS = (
    Row("short", "10 words, 1 token out, 1 at once", 1, 0, 1, 300),
    Row("short32", "10 words, 1 token out, 32 at once", 32, 0, 1, 600),
    Row("prompt1k", "1,000 tokens, 1 token out, 1 at once", 1, 1000, 1, 150),
    Row("prompt10k", "10,000 tokens, 1 token out, 1 at once", 1, 10000, 1, 20),
    Row("stream", "1 stream of 2,000 tokens, at once", 1, 0, 2000, 4),
    Row("paced", "1 stream of 2,000 tokens, 2 ms apart", 1, 0, 2000, 1, 2000),
    Row("streams32", "32 streams of 500 tokens, at once", 32, 0, 500, 32),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a row. cpu_s: of the router's process; first_s: a request's time to first token less that of its
    prefill node, asked directly."""

    cpu_s: float
    wall_s: float
    tokens: int
    first_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """A router to be measured, and how many words of prose make a token of its model."""

    router: LoneRouter
    words_per_token: float

    async def sample(self, row: Row, source: random.Random) -> Sample:
        """One turn of `row`. Raises LoadError."""
        prompts = [self._prompt(row, source) for _ in range(row.requests)]
        direct_s = await self._direct_s(row)
        used, began = servers.cpu_seconds([self.router.process]), time.perf_counter()
        done = await closed_loop(self.router.target, prompts, row)
        wall_s, cpu_s = time.perf_counter() - began, servers.cpu_seconds([self.router.process]) - used
        added = tuple(completion.first_s - direct_s for completion in done)
        return Sample(cpu_s, wall_s, sum(completion.tokens for completion in done), added)

    def _prompt(self, row: Row, source: random.Random) -> str:
        return words(source, round(row.prompt * self.words_per_token) or 10)

    async def _direct_s(self, row: Row) -> float:
        """Median seconds of the prefill node's own answer to a prompt of that length."""
        tokens = tuple(WORDS[i * STRIDE % len(WORDS)] for i in range(row.prompt or 10))
        job = Job("direct", 0, tokens, len(tokens), Generate(SamplingParams(max_tokens=1)), "nobody")
        taken = []
        async with connected(self.router.prefill_url) as connection:
            request = post(connection.host, "/attempts/prefill", pack(PrefillRequest(job)), kind="application/msgpack")
            for _ in range(50):
                began = time.perf_counter()
                await connection.send(request)
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(PROSE.read_text().split(), k=count))


async def closed_loop(target: Target, prompts: Sequence[str], row: Row) -> list[Completion]:
    """Ask for all of them on `at_once` connections that stay open; each asks again when it was answered."""
    left = iter(prompts)

    async def ask(connection: Connection) -> list[Completion]:
        return [await connection.complete(target.model, prompt, row.out, seed=row.pace_us) for prompt in left]

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(target.url)) for _ in range(row.at_once)]
        return [completion for done in await asyncio.gather(*map(ask, clients)) for completion in done]


async def words_per_token(router: Target) -> float:
    """In a thousand words of prose, by the router's own tokenizer."""
    count = 1000
    body = {"model": router.model, "prompt": words(random.Random(0), count)}
    async with httpx.AsyncClient(trust_env=False) as client:
        return count / int((await client.post(f"{router.url}/tokenize", json=body)).json()["count"])


def yardstick() -> float:
    """CPU milliseconds that a fixed piece of Python takes: by how much the machine was slower in another run."""
    body, began = {"prompt": "ten words", "tokens": list(range(100))}, time.process_time()
    for _ in range(2000):
        json.loads(json.dumps(body))
    return 1e3 * (time.process_time() - began)


def report(samples: dict[Row, list[Sample]], yards: Sequence[float]) -> str:
    """A Markdown table of medians, with the least of the CPU figures: neighbours on the machine only ever add."""
    lines = [
        "| | requests/s | CPU ms a request (least) | CPU µs a token (least) | first token later by, p50 | p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, turns in samples.items():
        firsts = [first_s for turn in turns for first_s in turn.first_s]
        requests = [1e3 * turn.cpu_s / row.requests for turn in turns]
        tokens = [1e6 * turn.cpu_s / turn.tokens for turn in turns]
        cells = (
            f"{statistics.median(row.requests / turn.wall_s for turn in turns):,.0f}" if row.out == 1 else "",
            f"{statistics.median(requests):.2f} ({min(requests):.2f})" if row.out == 1 else "",
            f"{statistics.median(tokens):.1f} ({min(tokens):.1f})" if row.out > 1 else "",
            f"{1e3 * statistics.median(firsts):.2f} ms",
            f"{1e3 * percentile(firsts, 0.99):.2f} ms" if len(firsts) >= 100 else "",
        )
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    lines.append(
        f"\nA fixed piece of Python took {statistics.median(yards):.1f} ms of CPU in the same rounds, "
        f"{min(yards):.1f} at least."
    )
    return "\n".join(lines)


def placement_report(counts: Sequence[int]) -> str:
    """A Markdown table: microseconds to place one request."""
    lines = ["| nodes | " + " | ".join(placing.KINDS) + " |", "| --- |" + " --- |" * len(placing.KINDS)]
    for count in counts:
        found = [placing.microseconds(count, kind) for kind in placing.KINDS]
        cells = [f"over {placing.LIMIT_S:.0f} s" if value is None else f"{value:,.0f} µs" for value in found]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def measure(rows: Sequence[Row], rounds: int) -> str:
    """Run the rows `rounds` times, after a turn that does not count. Returns the table."""
    samples, yards = defaultdict(list), []
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        async with lone_router(Path(folder)) as router:
            bench = Bench(router, await words_per_token(router.target))
            for row in rows:
                few = replace(row, requests=max(row.at_once, int(WARM_UP * row.requests)))
                await bench.sample(few, random.Random(f"warm-up {row.name}"))
            for number in range(rounds):
                for row in rows:
                    yards.append(yardstick())
                    samples[row].append(await bench.sample(row, random.Random(f"{row.name} {number}")))
    return report(samples, yards)


def main() -> None:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join([*names, "placement"]), help=f"of {', '.join(names)}, placement")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    only = options.only.split(",")
    if unknown := set(only) - {*names, "placement"}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(names)}, placement")
    if rows := [row for row in ROWS if row.name in only]:
        try:
            print(asyncio.run(measure(rows, options.rounds)), flush=True)
        except (LoadError, servers.StartError) as error:
            sys.exit(str(error))
    if "placement" in only:
        print(f"\nOne placement among\n\n{placement_report((10, 100, 1000))}")


if __name__ == "__main__":
    main()
