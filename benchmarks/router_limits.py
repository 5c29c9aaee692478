"""Measures a router's memory per open stream, and how long large bodies block its event loop.

    python -m benchmarks.router_limits [--streams 5000]

The router is a process of its own in front of mock nodes, as for `benchmarks.router`. Memory is the process's unique
set size (USS). A body blocks the loop for as long as the slowest probe of /health takes while the router reads it; one
probe follows another on an open connection."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from pathlib import Path

from benchmarks.load import Connection, LoadError, Target, connected, post
from benchmarks.lone_router import LoneRouter, lone_router
from benchmarks.router_rows import words

STREAMS, PACE_US, TOKENS = 5000, 900_000, 60
"""Streams open at a time, microseconds between two of their tokens, and their tokens: nearly a minute each."""
AT_ONCE = 100
"""Streams that begin at a time."""
SETTLE_S = 3.0
MILLION = 2**20 - 100
BODIES = {
    "a million token ids": b'{"prompt":[%b1]}' % (b"123," * MILLION),
    "a million stop strings": b'{"prompt":"a","stop":[%b"a"]}' % (b'"a",' * MILLION),
    "a million biases": b'{"prompt":"a","logit_bias":{%b"0":1}}' % b"".join(b'"%d":1,' % n for n in range(MILLION)),
    "a million unknown values": b'{"prompt":"a","unknown":[%b1]}' % (b"null," * MILLION),
}
"""Bodies of POST /v1/completions; each asks for one token."""


async def kib_a_stream(router: LoneRouter, streams: int) -> float:
    """Return KiB of the router's memory for each of `streams` streams that have begun."""
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(router.target.url)) for _ in range(streams)]
        source = random.Random(1)
        before = router.process.memory_full_info().uss
        tasks: list[asyncio.Task[object]] = []
        for begin in range(0, streams, AT_ONCE):
            tasks += [_started(each, router.target, words(source, 10)) for each in connections[begin : begin + AT_ONCE]]
            await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S)
        if ended := [task for task in tasks if task.done()]:
            raise LoadError(f"{len(ended)} of {streams} streams ended early: {ended[0].exception()}")
        used = router.process.memory_full_info().uss - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return used / 1024 / streams


def _started(connection: Connection, target: Target, prompt: str) -> asyncio.Task[object]:
    return asyncio.create_task(connection.complete(target.model, prompt, TOKENS, seed=PACE_US))


async def blocked_ms(router: LoneRouter, body: bytes) -> float:
    """Return the milliseconds of the slowest probe while the router reads this body."""
    slowest, done = 0.0, asyncio.Event()

    async def probe(connection: Connection) -> None:
        nonlocal slowest
        probe_request = f"GET /health HTTP/1.1\r\nhost: {connection.host}\r\n\r\n".encode()
        while not done.is_set():
            began = time.perf_counter()
            await connection.send(probe_request)
            slowest = max(slowest, time.perf_counter() - began)
            await asyncio.sleep(0.001)

    async with connected(router.target.url) as probing, connected(router.target.url) as tasks:
        probes = asyncio.create_task(probe(probing))
        await asyncio.sleep(0.1)
        slowest = 0.0
        with contextlib.suppress(LoadError):  # most are refused
            await tasks.send(post(tasks.host, "/v1/completions", body))
        done.set()
        await probes
    return 1e3 * slowest


async def report(streams: int = STREAMS) -> str:
    """Return the figures as Markdown."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        async with lone_router(Path(folder)) as router:
            idle_ms = await blocked_ms(router, b'{"prompt":"a"}')
            lines = [f"- {name}: {await blocked_ms(router, body):.1f} ms" for name, body in BODIES.items()]
            await kib_a_stream(router, AT_ONCE)
            kib = await kib_a_stream(router, streams)
    return "\n".join(
        (
            f"An open stream takes {kib:.1f} KiB of the router's memory ({streams:,} open; goal: <= 25).",
            f"\nSlowest answer of the router while it reads a body ({idle_ms:.1f} ms without; goal: <= 20):\n",
            *lines,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=STREAMS)
    print(asyncio.run(report(parser.parse_args().streams)))


if __name__ == "__main__":
    main()
