"""Workloads of the serving benchmark: the prompts that clients send, and the figures computed from the answers.

Every server gets the same prompts in a round, and different ones in the next round."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load import Completion, Target, complete, random_prompt

Figures = dict[str, float]
"""Values by name of the figure."""

Run = Callable[[Target, random.Random], Coroutine[Any, Any, Figures]]

SHARED, SUFFIX = 1536, 64
RUNNING, ARRIVING_LEN = 4, 2048
"""Streams that run, and the length of the prompts that arrive meanwhile."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Format of a figure. rises: more is better."""

    title: str
    unit: str
    rises: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload: run(target, source of prompts) returns its figures, of which the first is the main one."""

    name: str
    run: Run
    figures: dict[str, Figure]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def output_rate(completions: Sequence[Completion]) -> float:
    """Return output tokens per second from the first request sent to the last token received."""
    begun, ended = min(c.began for c in completions), max(c.arrivals[-1] for c in completions)
    return sum(c.tokens for c in completions) / (ended - begun)


def gaps(completions: Sequence[Completion], begun: float, ended: float) -> list[float]:
    """Return seconds between consecutive arrivals of a stream, for the gaps that overlap [begun, ended]."""
    pairs = [pair for c in completions for pair in zip(c.arrivals, c.arrivals[1:], strict=False)]
    return [later - earlier for earlier, later in pairs if later >= begun and earlier <= ended]


async def at_once(target: Target, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
    return await asyncio.gather(*(complete(target, prompt, max_tokens) for prompt in prompts))


async def single(target: Target, source: random.Random) -> Figures:
    done = await complete(target, random_prompt(source, 128), 128)
    return {"tokens_per_s": done.rate, "first_ms": 1e3 * done.first_s}


def prefill(length: int) -> Run:
    async def run(target: Target, source: random.Random) -> Figures:
        done = await complete(target, random_prompt(source, length), 1)
        return {"tokens_per_s": length / done.first_s}

    return run


def streams(count: int) -> Run:
    async def run(target: Target, source: random.Random) -> Figures:
        done = await at_once(target, [random_prompt(source, 256) for _ in range(count)], 128)
        return {"tokens_per_s": output_rate(done), "first_ms": 1e3 * statistics.median(c.first_s for c in done)}

    return run


async def shared_prefix(target: Target, source: random.Random) -> Figures:
    """Run eight streams whose prompts share a prefix that eight others have just cached, in every slot."""
    prefix = random_prompt(source, SHARED)
    for max_tokens in (1, 32):
        done = await at_once(target, [prefix + random_prompt(source, SUFFIX) for _ in range(8)], max_tokens)
    return {"tokens_per_s": output_rate(done), "first_ms": 1e3 * statistics.median(c.first_s for c in done)}


async def again(target: Target, source: random.Random) -> Figures:
    """Return the time to first token of a new prompt, and of the same prompt again."""
    prompt = random_prompt(source, 1024)
    cold = await complete(target, prompt, 4)
    await asyncio.sleep(0.3)
    cached = await complete(target, prompt, 4)
    return {"cold_ms": 1e3 * cold.first_s, "cached_ms": 1e3 * cached.first_s}


async def interference(target: Target, source: random.Random) -> Figures:
    """Return gaps in running streams while long prompts arrive one after another."""
    running = [
        asyncio.create_task(complete(target, random_prompt(source, 64), 160), name=f"stream {i}")
        for i in range(RUNNING)
    ]
    await asyncio.sleep(0.5)
    arrived = []
    while not any(task.done() for task in running):
        arrived.append(await complete(target, random_prompt(source, ARRIVING_LEN), 1))
    done = await asyncio.gather(*running)
    ended = min(arrived[-1].arrivals[-1], *(c.arrivals[-1] for c in done))
    between = gaps(done, arrived[0].began, ended)
    return {
        "p99_ms": 1e3 * percentile(between, 0.99),
        "p50_ms": 1e3 * percentile(between, 0.5),
        "prompts_per_s": len(arrived) / (arrived[-1].arrivals[-1] - arrived[0].began),
    }


def _rate(title: str) -> Figure:
    return Figure(title, "tokens/s", rises=True)


WORKLOADS = (
    Workload(
        "single",
        single,
        {
            "tokens_per_s": _rate("1 stream, 128 in / 128 out: output"),
            "first_ms": Figure("1 stream: time to first token", "ms"),
        },
    ),
    Workload("prefill512", prefill(512), {"tokens_per_s": _rate("prefill of 512 tokens")}),
    Workload("prefill2048", prefill(2048), {"tokens_per_s": _rate("prefill of 2,048 tokens")}),
    *(
        Workload(
            f"streams{count}",
            streams(count),
            {
                "tokens_per_s": _rate(f"{count} streams, 256 in / 128 out: output"),
                "first_ms": Figure(f"{count} streams: time to first token, median", "ms"),
            },
        )
        for count in (8, 32)
    ),
    Workload(
        "prefix8",
        shared_prefix,
        {
            "tokens_per_s": _rate("8 streams, 1,536 cached + 64 in / 32 out: output"),
            "first_ms": Figure("8 cached streams: time to first token, median", "ms"),
        },
    ),
    Workload(
        "again",
        again,
        {
            "cold_ms": Figure("1,024 tokens: time to first token, cold", "ms"),
            "cached_ms": Figure("1,024 tokens: time to first token, cached", "ms"),
        },
    ),
    Workload(
        "interference",
        interference,
        {
            "p99_ms": Figure("4 streams while 2,048-token prompts arrive: inter-token latency p99", "ms"),
            "p50_ms": Figure("4 streams while prompts arrive: inter-token latency p50", "ms"),
            "prompts_per_s": Figure("prompts answered beside 4 streams", "/s", rises=True),
        },
    ),
)

PROCESS_FIGURES = {
    "start": {"ready_s": Figure("start to ready", "s")},
    "memory": {
        "resident_gb": Figure("resident memory, sum of all processes", "GB"),
        "proportional_gb": Figure("resident memory, shared pages counted once", "GB"),
    },
    "ships": {"hidden_percent": Figure("share of transfer hidden behind compute", "%", rises=True)},
}
"""Figures of the processes instead of a load: from the start, and after all rounds."""

FIGURES = {workload.name: workload.figures for workload in WORKLOADS} | PROCESS_FIGURES
