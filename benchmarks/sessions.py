"""Measures how much of sessions a running cluster caches: agents with tool pauses, and a fan-out of a cold history.

    kvferry serve --prefill 0 --decode 1 --kv-cache-gib 0.2
    python -m benchmarks.sessions agents [--url http://127.0.0.1:8000] [--seconds 120]
    python -m benchmarks.sessions fan-out [--url http://127.0.0.1:8000] [--count 8] [--tokens 2048]

Agents send growing histories of random tokens and pause for 1 to 20 s, beside prompts that are sent once. It prints the
share of prompt tokens that were not computed, and times to first token in seconds. Each run draws the same prompts and
pauses. With `--blocks`, the size of the node's pool, it also prints the share that orders of eviction would have found
of the same prompts at the same times in one such pool, among them an oracle (benchmarks/eviction.py)."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from statistics import quantiles

import httpx

from benchmarks.eviction import ORACLE, SLRU, Replay
from kvferry.protocol.hashing import chain
from kvferry.simulate.trace_request import TraceRequest

BLOCK_SIZE = 16
"""Tokens of a KV block of the node."""
VOCABULARY = range(1000, 40_000)
AGENTS, APPS, SYSTEM, RESULT, OUTPUT = 8, 2, 256, 96, 8
"""Agents at a time; system prompts, and their tokens; mean tokens of a tool's result; tokens of an output."""
TURNS = (6, 14)
"""Minimum and maximum number of turns of a task."""
ONCE_S, ONCE = 1.5, 320
"""Mean seconds between two prompts that are sent once, and their tokens."""


@dataclass(slots=True)
class Figures:
    """Prompt tokens, cached prompt tokens, and times to first token in seconds."""

    prompt: int = 0
    cached: int = 0
    ttft_s: list[float] = field(default_factory=list)
    sent: list[tuple[float, int, list[int]]] = field(default_factory=list)
    """Of each prompt: its time in seconds, its length, and its tokens with those of its output."""

    def __str__(self) -> str:
        cuts = quantiles(self.ttft_s, n=100, method="inclusive")
        found = f"{100 * self.cached / self.prompt:.1f} % of {self.prompt} prompt tokens cached"
        return f"{len(self.ttft_s)} requests, {found}, TTFT p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s"


async def ask(http: httpx.AsyncClient, figures: Figures, prompt: list[int], session: str = "") -> list[int]:
    """Send a prompt and return its output; count its figures."""
    body = {
        "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    began, first_s, output = time.monotonic(), 0.0, list[int]()
    headers = {"x-session-id": session} if session else {}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            first_s = first_s or time.monotonic() - began
            for choice in chunk["choices"]:
                output += choice.get("token_ids") or []
            if usage := chunk.get("usage"):
                figures.prompt += usage["prompt_tokens"]
                figures.cached += usage["prompt_tokens_details"]["cached_tokens"]
    figures.ttft_s.append(first_s)
    figures.sent.append((began, len(prompt), [*prompt, *output]))
    return output


def replayed(order: str, blocks: int, sent: list[tuple[float, int, list[int]]]) -> int:
    """Return the tokens that an order of eviction would have found of these prompts in a pool of `blocks`."""
    trace = [
        TraceRequest(number, at, length, len(tokens) - length, tuple(chain(b"", tokens, BLOCK_SIZE)))
        for number, (at, length, tokens) in enumerate(sorted(sent))
    ]
    return Replay(order, blocks, trace, BLOCK_SIZE).found


def text(rng: random.Random, tokens: int) -> list[int]:
    """Return random tokens."""
    return rng.choices(VOCABULARY, k=tokens)


def turns(rng: random.Random) -> int:
    """Draw the number of turns of a task."""
    return rng.randint(*TURNS)


def result_tokens(rng: random.Random) -> int:
    """Draw the tokens of a tool's result."""
    return max(16, round(rng.lognormvariate(0, 0.5) * RESULT))


def pause_s(rng: random.Random) -> float:
    """Draw the seconds that a tool takes."""
    return min(20.0, max(1.0, rng.lognormvariate(1.3, 0.8)))


async def agent(http: httpx.AsyncClient, figures: Figures, number: int, until: float) -> None:
    """Work on one task after the other until the time is up."""
    rng, task = random.Random(f"agent {number}"), 0
    systems = [text(random.Random(f"app {app}"), SYSTEM) for app in range(APPS)]
    await asyncio.sleep(rng.random() * 5)
    while time.monotonic() < until:
        history, session = [*systems[number % APPS], *text(rng, 2 * RESULT)], f"agent {number} task {task}"
        for _ in range(turns(rng)):
            history += await ask(http, figures, history, session)
            history += text(rng, result_tokens(rng))
            paused_s = pause_s(rng)
            if time.monotonic() + paused_s > until:
                return
            await asyncio.sleep(paused_s)
        task += 1


async def once(http: httpx.AsyncClient, figures: Figures, until: float) -> None:
    """Send prompts that are not repeated."""
    rng, running = random.Random("once"), set[asyncio.Task[list[int]]]()
    while time.monotonic() < until:
        running.add(task := asyncio.create_task(ask(http, figures, text(rng, ONCE))))
        task.add_done_callback(running.discard)
        await asyncio.sleep(rng.expovariate(1 / ONCE_S))
    await asyncio.gather(*running)


async def agents(url: str, seconds: float, blocks: int) -> None:
    """Run all agents; print the figures of their requests and of the other requests.

    blocks: of the node's pool, for a replay in other orders of eviction; 0: none."""
    own, others, until = Figures(), Figures(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(agent(http, own, number, until) for number in range(AGENTS)), once(http, others, until))
    print(f"agents: {own}\nonce:   {others}")
    for order in ("lru", SLRU, "value", ORACLE) if blocks else ():
        # Prompts that are sent once find nothing.
        print(f"replay, {order}: {100 * replayed(order, blocks, own.sent + others.sent) / own.prompt:.1f} %")


async def fan_out(url: str, count: int, tokens: int) -> None:
    """Send a cold history `count` times at once, each with another end."""
    rng, figures = random.Random(time.time()), Figures()
    history = text(rng, tokens)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(ask(http, figures, [*history, *text(rng, 8 + 4 * end)]) for end in range(count)))
    print(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["agents", "fan-out"])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    if options.what == "agents":
        asyncio.run(agents(options.url, options.seconds, options.blocks))
    else:
        asyncio.run(fan_out(options.url, options.count, options.tokens))


if __name__ == "__main__":
    main()
