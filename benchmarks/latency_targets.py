"""Measures goodput with and without latency targets, at a cluster's capacity and beyond it.

    python -m benchmarks.latency_targets [--seconds 30 --rounds 2 --load 1 --load 1.3 --ttft-ms 1000 --itl-ms 80]

A closed loop of clients finds the capacity in requests per second. Then requests arrive at random at multiples of it,
alternately under the key of a tenant with both targets and of one with none, on one cluster of the demo model. Goodput
counts the requests per second whose first token and whose mean time between tokens were within the targets."""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import servers
from benchmarks.load import Completion, LoadError, Rejected, Target, connected, random_prompt
from benchmarks.lone_router import kvferry
from benchmarks.subjects import Launch
from kvferry.router.tenants.keys import entry, new_key

TENANTS = ("without targets", "with targets")


@dataclass(frozen=True, slots=True)
class Goal:
    """Targets of a request, in seconds."""

    first_s: float
    gap_s: float

    def met(self, done: Completion) -> bool:
        gaps = max(1, done.tokens - 1)
        return done.first_s <= self.first_s and (done.arrivals[-1] - done.arrivals[0]) / gaps <= self.gap_s


@dataclass(slots=True)
class Phase:
    """Requests of one tenant at one load."""

    done: list[Completion] = field(default_factory=list)
    rejected: int = 0
    seconds: float = 0.0

    def row(self, goal: Goal) -> tuple[float, float, int]:
        """Return goodput in requests per second, the share of admitted requests that met the goal, and the rejected."""
        met = sum(map(goal.met, self.done))
        return met / self.seconds, met / max(1, len(self.done)), self.rejected


class Load:
    """Requests of one shape to one cluster, under the key of a tenant."""

    def __init__(self, target: Target, keys: dict[str, str], prompt: int, output: int) -> None:
        self._target, self._keys, self._prompt, self._output = target, keys, prompt, output

    async def capacity(self, clients: int, seconds: float, source: random.Random) -> float:
        """Return requests per second of a closed loop, without its first and last fifth."""
        ends: list[float] = []
        began = time.perf_counter()

        async def client(own: random.Random) -> None:
            while time.perf_counter() - began < seconds:
                await self._one("without targets", own, Phase())
                ends.append(time.perf_counter() - began)

        await asyncio.gather(*(client(random.Random(source.random())) for _ in range(clients)))
        inner = [end for end in ends if seconds / 5 <= end <= 4 * seconds / 5]
        return len(inner) / (3 * seconds / 5)

    async def open_loop(self, tenant: str, found: Phase, rate: float, seconds: float, source: random.Random) -> None:
        """Let requests arrive at random for some seconds, and wait until they end."""
        tasks, at = [], 0.0
        began = time.perf_counter()
        while (at := at + source.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(tenant, random.Random(source.random()), found)))
        await asyncio.gather(*tasks)
        found.seconds += seconds

    async def _one(self, tenant: str, source: random.Random, found: Phase) -> None:
        prompt = random_prompt(source, self._prompt)
        async with connected(self._target.url, self._keys[tenant]) as connection:
            try:
                found.done.append(await connection.complete(self._target.model, prompt, self._output))
            except Rejected:
                found.rejected += 1


def report(phases: dict[tuple[float, str], list[Phase]], goal: Goal, capacity: float) -> str:
    """Return a Markdown table of medians over the rounds."""
    lines = [
        f"Capacity {capacity:.2f} requests/s; first token within {goal.first_s:.2f} s, tokens {goal.gap_s:.3f} s apart",
        "",
        "| load | | goodput, requests/s | met, of admitted | rejected | relative to first load |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    first: dict[str, float] = {}
    for (load, tenant), rounds in phases.items():
        rows = [each.row(goal) for each in rounds]
        goodput, share, rejected = map(statistics.median, zip(*rows, strict=True))
        base = first.setdefault(tenant, goodput)
        ratio = f"{goodput / base:.0%}" if base else "–"
        lines.append(f"| {load} × | {tenant} | {goodput:.2f} | {share:.1%} | {rejected:.0f} | {ratio} |")
    return "\n".join(lines)


async def measure(options: argparse.Namespace) -> str:
    """Start a cluster and run all phases `rounds` times. Raises StartError, LoadError."""
    keys, goal = {name: new_key() for name in TENANTS}, Goal(options.ttft_ms / 1e3, options.itl_ms / 1e3)
    phases: dict[tuple[float, str], list[Phase]] = {(load, name): [] for load in options.load for name in TENANTS}
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        file, port = Path(folder) / "keys.toml", servers.free_port()
        targets = f"ttft_ms = {options.ttft_ms}\nitl_ms = {options.itl_ms}\n"
        names = {name: name.replace(" ", "-") for name in TENANTS}
        file.write_text("".join(entry(names[n], keys[n]) + (targets if n == TENANTS[1] else "") for n in TENANTS))
        command = (*kvferry(), "serve", "--port", str(port), "--api-keys", str(file), *shlex.split(options.serve))
        launch = Launch(command, "/ready?nodes=1", key=keys[TENANTS[0]])
        with servers.running(launch, port, Path(folder) / "serve.log") as server:
            load = Load(server.target, keys, options.prompt, options.output)
            await load.capacity(options.clients, options.seconds / 2, random.Random("warm-up"))
            capacity = await load.capacity(options.clients, options.seconds, random.Random("capacity"))
            for number in range(options.rounds):
                for (multiple, tenant), rounds in phases.items():
                    rounds.append(found := Phase())
                    source = random.Random(f"{multiple} {number}")
                    await load.open_loop(tenant, found, multiple * capacity, options.seconds, source)
                    print(f"round {number + 1}, {multiple} x, {tenant}: {found.row(goal)}", file=sys.stderr, flush=True)
    return report(phases, goal, capacity)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, action="append", help="multiple of the capacity")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30, help="seconds per phase")
    parser.add_argument("--clients", type=int, default=16, help="clients in the closed loop")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of an output")
    parser.add_argument("--ttft-ms", type=int, default=1000)
    parser.add_argument("--itl-ms", type=int, default=80)
    parser.add_argument("--serve", default="", help="further flags of kvferry serve")
    options = parser.parse_args(arguments)
    options.load = options.load or [1.0, 1.3]
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(asyncio.run(measure(parse())), flush=True)
    except (LoadError, servers.StartError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
