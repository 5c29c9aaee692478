"""Measures how long one tenant waits for its first token while another floods the cluster.

    python -m benchmarks.fairness [--requests 40 --rounds 2 --flood 64 --serve "--prefill 0"]

A tenant sends requests at a steady rate below its half of the machine: alone, while another tenant keeps `--flood`
requests in flight, and while a flood uses the tenant's own key and cannot be distinguished from its requests. The
phases take turns in every round, on one cluster with the demo model; figures are of all rounds together."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import servers
from benchmarks.load import Completion, LoadError, Target, connected, random_prompt
from benchmarks.lone_router import kvferry
from benchmarks.subjects import Launch
from benchmarks.workloads import percentile
from kvferry.router.tenants.keys import entry, new_key

PHASES = {"alone": "", "another tenant floods": "flood", "its own key floods": "steady"}
"""Phases, and the key that the flood uses."""
SETTLE_S = 3.0
"""Seconds for which a flood runs before requests count."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and output tokens of a request."""

    prompt: int
    output: int


@dataclass(slots=True)
class Phase:
    """Figures of a phase: the steady tenant's requests, and the flood's requests and seconds."""

    steady: list[Completion] = field(default_factory=list)
    flooded: int = 0
    seconds: float = 0.0

    def first_s(self, share: float) -> float:
        return percentile([each.first_s for each in self.steady], share)


@dataclass(frozen=True, slots=True)
class Load:
    """Cluster and its load.

    The steady tenant has one request at a time, waits about `pause_s` before the next, and begins none after `limit_s`
    seconds of a phase."""

    target: Target
    keys: dict[str, str]
    steady: Shape
    flood: Shape
    at_once: int
    pause_s: float
    limit_s: float

    async def phase(self, found: Phase, flooder: str, requests: int, source: random.Random) -> None:
        """Run some of the steady tenant's requests, while the key `flooder` floods, if there is one."""
        counted = [0]
        async with self._flooding(flooder, source, counted):
            if flooder:
                await asyncio.sleep(SETTLE_S)
            before, began = counted[0], time.perf_counter()
            async with connected(self.target.url, self.keys["steady"]) as connection:
                for _ in range(requests):
                    if time.perf_counter() - began > self.limit_s:
                        break
                    prompt = random_prompt(source, self.steady.prompt)
                    found.steady.append(await connection.complete(self.target.model, prompt, self.steady.output))
                    await asyncio.sleep(self.pause_s * source.uniform(0.5, 1.5))
            found.flooded += counted[0] - before
            found.seconds += time.perf_counter() - began

    @contextlib.asynccontextmanager
    async def _flooding(self, flooder: str, source: random.Random, counted: list[int]) -> AsyncIterator[None]:
        """Flood while the context is open; its requests are cancelled at the end."""

        async def client(seed: float) -> None:
            own = random.Random(seed)
            async with connected(self.target.url, self.keys[flooder]) as connection:
                while True:
                    prompt = random_prompt(own, self.flood.prompt)
                    await connection.complete(self.target.model, prompt, self.flood.output)
                    counted[0] += self.flood.output

        tasks = [asyncio.create_task(client(source.random())) for _ in range(self.at_once if flooder else 0)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(1.0)
        broken = [end for end in ends if isinstance(end, Exception)]
        if broken:
            raise broken[0]


def report(phases: dict[str, Phase]) -> str:
    """Return a Markdown table with ratios to the phase without a flood."""
    alone = phases["alone"]
    lines = [
        "| | requests | TTFT p50 | p95 | p50 to alone | p95 to alone | flood's tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, phase in phases.items():
        cells = (
            str(len(phase.steady)),
            *(f"{1e3 * phase.first_s(share):,.0f} ms" for share in (0.5, 0.95)),
            *(f"{phase.first_s(share) / alone.first_s(share):.2f}" for share in (0.5, 0.95)),
            f"{phase.flooded / phase.seconds:,.0f}" if PHASES[name] else "",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def measure(options: argparse.Namespace) -> dict[str, Phase]:
    """Start a cluster and run all phases `rounds` times. Raises StartError, LoadError."""
    keys = {name: new_key() for name in ("steady", "flood")}
    phases: dict[str, Phase] = defaultdict(Phase)
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("".join(entry(name, key) for name, key in keys.items()))
        port = servers.free_port()
        command = (*kvferry(), "serve", "--port", str(port), "--api-keys", str(file), *shlex.split(options.serve))
        launch = Launch(command, "/ready?nodes=1", key=keys["steady"])
        with servers.running(launch, port, Path(folder) / "serve.log") as server:
            load = Load(
                server.target, keys, options.steady, options.flood_shape, options.flood, options.pause, options.seconds
            )
            await load.phase(Phase(), "", 3, random.Random("warm-up"))
            for number in range(options.rounds):
                for name in options.only:
                    source = random.Random(f"{name} {number}")
                    await load.phase(phases[name], PHASES[name], options.requests, source)
                    print(
                        f"round {number + 1}, {name}: p50 {phases[name].first_s(0.5):.2f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    return phases


def shape(text: str) -> Shape:
    prompt, output = text.split("/")
    return Shape(int(prompt), int(output))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of the steady tenant, in each phase of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--flood", type=int, default=64, help="requests that the other keeps in the air")
    parser.add_argument("--steady", type=shape, default="512/8", help="prompt/output tokens of the steady tenant")
    parser.add_argument("--flood-shape", type=shape, default="64/64", help="prompt/output tokens of the flood")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two requests of the steady tenant")
    parser.add_argument("--serve", default="", help="further flags of kvferry serve")
    parser.add_argument("--seconds", type=float, default=120, help="after which a phase begins no other request")
    parser.add_argument("--only", default=",".join(PHASES), help="phases, beginning with alone")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(report(asyncio.run(measure(parse()))), flush=True)
    except (LoadError, servers.StartError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
