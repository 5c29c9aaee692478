"""Rows of the router benchmark (requests, concurrency, goals), and the measurement of one turn of a row."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks import servers
from benchmarks.load import Completion, Target, connected
from benchmarks.lone_router import LoneRouter

PROSE = Path(__file__).with_name("prose.txt")
LAG = "kvferry_event_loop_lag_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `requests` requests, `at_once` of them at a time.

    Each has a prompt of about `prompt` tokens (0: ten words), all with the same first `prefix` tokens, and exactly
    `out` output tokens, `pace_us` microseconds apart.

        goal   the project's goal, as text; peer: whether the row is also measured with `vllm-router`
        shows  figures of the row: first tokens, requests, tokens
    """

    name: str
    title: str
    at_once: int
    prompt: int
    out: int
    requests: int
    pace_us: int = 0
    prefix: int = 0
    goal: str = ""
    peer: bool = False
    shows: str = "requests"


ROWS = (
    Row("short", "10 words, 1 token out, 1 at once", 1, 0, 1, 300, peer=True),
    Row("short32", "10 words, 1 token out, 32 at once", 32, 0, 1, 600, peer=True),
    Row("prompt1k", "1,000 tokens, 1 token out, 1 at once", 1, 1000, 1, 150, goal="added <= 2 ms", peer=True),
    Row(
        "prompt1k32", "1,000 tokens, 32 streams of 64 tokens, 20 ms apart", 32, 1000, 64, 96, 20_000,
        goal="added <= 5 ms", peer=True, shows="first",
    ),
    Row("prompt10k", "10,000 tokens, 1 token out, 1 at once", 1, 10_000, 1, 20),
    Row(
        "repeated100k", "100,000 tokens, all but 200 repeated, 1 token out", 1, 100_000, 1, 20, prefix=99_800,
        goal="<= 100 ms of CPU, loop lag p99 <= 10 ms",
    ),
    Row("requests", "10 words, 16 tokens out, 32 at once", 32, 0, 16, 600, goal=">= 1,000/s a core", peer=True),
    Row(
        "requests2000", "10 words, 16 tokens out, 2,000 streams open", 2000, 0, 16, 3000, 900_000,
        goal=">= 1,000/s a core", peer=True,
    ),
    Row("stream", "1 stream of 2,000 tokens, at once", 1, 0, 2000, 4, shows="tokens"),
    Row("paced", "1 stream of 2,000 tokens, 2 ms apart", 1, 0, 2000, 1, 2000, shows="tokens"),
    Row("streams32", "32 streams of 500 tokens, at once", 32, 0, 500, 32, shows="tokens"),
    Row(
        "streams128", "128 streams of 250 tokens, at once", 128, 0, 250, 128, goal=">= 40,000/s a core", peer=True,
        shows="tokens",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a row.

    cpu_s: of the router's process; first_s: a request's time to first token minus that of the node without the router;
    lag: event-loop lag counts by upper bound in seconds."""

    cpu_s: float
    wall_s: float
    tokens: int
    first_s: tuple[float, ...]
    lag: dict[float, int]


@dataclass(frozen=True, slots=True)
class Bench:
    """Router under measurement, and words of prose per token of its model."""

    router: LoneRouter
    words_per_token: float

    async def sample(self, row: Row, source: random.Random) -> Sample:
        """Run one turn of `row`. Raises LoadError."""
        prefix = self._words(random.Random(row.name), row.prefix)
        rest = row.prompt - row.prefix
        prompts = [prefix + self._words(source, rest) for _ in range(row.requests)]
        direct_s = await self.router.direct_s(row.prompt or 10)
        lag = await self._lag()
        used, began = servers.cpu_seconds([self.router.process]), time.perf_counter()
        done = await closed_loop(self.router.target, prompts, row)
        wall_s, cpu_s = time.perf_counter() - began, servers.cpu_seconds([self.router.process]) - used
        added = tuple(completion.first_s - direct_s for completion in done)
        late = {bound: count - lag.get(bound, 0) for bound, count in (await self._lag()).items()}
        return Sample(cpu_s, wall_s, sum(completion.tokens for completion in done), added, late)

    def _words(self, source: random.Random, tokens: int) -> str:
        return words(source, round(tokens * self.words_per_token) or 10) + " "

    async def _lag(self) -> dict[float, int]:
        """Return the event loop's lag counts by upper bound in seconds; empty if the router reports none."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{self.router.target.url}/metrics")
        lines = [line for line in answer.text.splitlines() if line.startswith(LAG)] if answer.is_success else []
        pairs = (line.split('le="')[1].split('"} ') for line in lines)
        return {float(bound): int(float(count)) for bound, count in pairs}


def words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(PROSE.read_text().split(), k=count))


async def closed_loop(target: Target, prompts: Sequence[str], row: Row) -> list[Completion]:
    """Send all prompts on `at_once` connections that stay open; each sends the next after an answer.

    If tokens have a pace, connections begin one after another over the duration of a stream, so that `at_once` streams
    are open and none waits for the prompts of others."""
    left = iter(prompts)

    async def ask(after_s: float) -> list[Completion]:
        await asyncio.sleep(after_s)
        async with connected(target.url) as connection:
            return [await connection.complete(target.model, prompt, row.out, seed=row.pace_us) for prompt in left]

    interval_s = 1e-6 * row.pace_us * row.out / row.at_once
    clients = (ask(number * interval_s) for number in range(row.at_once))
    return [completion for done in await asyncio.gather(*clients) for completion in done]


async def words_per_token(router: Target) -> float:
    """Measure words per token with a thousand words of prose and the router's own tokenizer."""
    count = 1000
    body = {"model": router.model, "prompt": words(random.Random(0), count)}
    async with httpx.AsyncClient(trust_env=False) as client:
        return count / int((await client.post(f"{router.url}/tokenize", json=body)).json()["count"])


async def completion_s(target: Target) -> float:
    """Return the median seconds to the first token of a worker's own answer to a completion."""
    row = Row("direct", "", 1, 0, 1, 50)
    done = await closed_loop(target, ["ten words"] * row.requests, row)
    return statistics.median(completion.first_s for completion in done)
