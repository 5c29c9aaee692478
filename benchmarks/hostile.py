"""Measures how hostile clients affect an honest one: time to first token, gaps in its streams, and router pauses.

    python -m benchmarks.hostile [--only bodies,grammars --rounds 2 --samples 40 --control --serve "--prefill 0"]

A neighbour begins short streams at a fixed rate, while a prober measures the router's liveness answers. Every hostile
phase follows a phase without attack, on one cluster with the demo model, and is compared with all phases without
attack. Neighbour and attackers have keys of their own. The attackers are a process at a lower priority, on the same
cores: with --control a third phase has a process that uses as much of a core as they did and sends nothing. The ratio
of these two phases is the effect of the attack."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks import servers
from benchmarks.attacks import ATTACKS
from benchmarks.load import Completion, LoadError, connected, random_prompt
from benchmarks.lone_router import kvferry
from benchmarks.subjects import Launch
from benchmarks.workloads import percentile
from kvferry.router.tenants.keys import entry, new_key

SETTLE_S = 1.0
"""Seconds for which a phase runs before requests count, and for which the cluster rests after it."""
PROBE_S = 0.02
PROMPT, OUTPUT = 48, 8
"""Tokens of a neighbour's prompt and output."""
ALONE, BURN = "alone", "burn"
AGAINST = {"no readers": "readers"}
"""Phases that are compared with another phase than the one without attack."""


@dataclass(slots=True)
class Phase:
    """Figures of a phase.

    The neighbour's streams and errors; seconds of the router's liveness answers; the attackers' answers by status; and
    seconds of CPU by process, with the phase's seconds."""

    streams: list[Completion] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    alive_s: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def first_s(self, share: float) -> float:
        return percentile([each.first_s for each in self.streams], share)

    def gap_s(self, share: float) -> float:
        """Return a quantile of the gaps between two pieces of a stream, in seconds."""
        gaps = [b - a for each in self.streams for a, b in zip(each.arrivals, each.arrivals[1:], strict=False)]
        return percentile(gaps, share)


@dataclass(frozen=True, slots=True)
class Load:
    """Cluster with its neighbour, who begins `rate` streams per second."""

    server: servers.Server
    keys: dict[str, str]
    rate: float

    async def phase(self, found: Phase, command: Sequence[str], samples: int, source: random.Random) -> None:
        """Run streams, and a process of hostile clients if `command` is not empty."""
        async with self._attacked(found, command) as attackers:
            await asyncio.sleep(SETTLE_S)
            before, began = self._used(attackers), time.perf_counter()
            probing = asyncio.create_task(self._probe(found))
            streams = []
            for number in range(samples):
                await asyncio.sleep(began + number / self.rate - time.perf_counter())
                streams.append(asyncio.create_task(self._stream(found, source)))
            await asyncio.gather(*streams)
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            found.cpu.update({name: used - before[name] for name, used in self._used(attackers).items()})
            found.seconds += time.perf_counter() - began
        await asyncio.sleep(SETTLE_S)

    def _used(self, attackers: Sequence[psutil.Process]) -> dict[str, float]:
        """Return the seconds of CPU used so far; a router's children count as the router."""
        router, nodes = list[psutil.Process](), list[psutil.Process]()
        for process in self.server.processes():
            words = set(process.cmdline())
            if "router" in words:
                router += [process, *process.children(recursive=True)]
            elif words & {"prefill", "decode"}:
                nodes.append(process)
        kinds = {"router": router, "nodes": nodes, "attackers": attackers}
        return {kind: servers.cpu_seconds(processes) for kind, processes in kinds.items()}

    async def _stream(self, found: Phase, source: random.Random) -> None:
        try:
            async with connected(self.server.target.url, self.keys["neighbour"]) as connection:
                prompt = random_prompt(source, PROMPT)
                found.streams.append(await connection.complete(self.server.target.model, prompt, OUTPUT))
        except LoadError as error:
            found.errors[str(error)[:80]] += 1

    async def _probe(self, found: Phase) -> None:
        async with connected(self.server.target.url) as connection:
            while True:
                began = time.perf_counter()
                await connection.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                found.alive_s.append(time.perf_counter() - began)
                await asyncio.sleep(PROBE_S)

    @contextlib.asynccontextmanager
    async def _attacked(self, found: Phase, command: Sequence[str]) -> AsyncIterator[list[psutil.Process]]:
        if not command:
            yield []
            return
        argv = (sys.executable, "-m", "benchmarks.attacks", *command)
        process = await asyncio.create_subprocess_exec(*argv, cwd=servers.ROOT, stdout=asyncio.subprocess.PIPE)
        try:
            yield [psutil.Process(process.pid)]
            assert process.returncode is None, f"{command[0]} has ended"
            process.terminate()
            output, _ = await asyncio.wait_for(process.communicate(), 5)
            found.answers.update(json.loads(output) if output else {})
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def measure(options: argparse.Namespace, phases: dict[str, Phase]) -> None:
    """Start a cluster and run all phases `rounds` times. Raises StartError, LoadError."""
    keys = {name: new_key() for name in ("neighbour", "hostile")}
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("".join(entry(name, key) for name, key in keys.items()))
        port, key_options = servers.free_port(), () if options.open else ("--api-keys", str(file))
        command = (*kvferry(), "serve", "--port", str(port), *key_options, *shlex.split(options.serve))
        launch = Launch(command, "/ready?nodes=1", key=keys["neighbour"])
        with servers.running(launch, port, Path(folder) / "serve.log") as server:
            load = Load(server, keys, options.rate)
            await every_model_ready(server)
            await load.phase(Phase(), (), 10, random.Random("warm-up"))
            for number in range(options.rounds):
                for name in options.only:
                    source = random.Random(f"{name} {number}")
                    await load.phase(phases[ALONE], (), options.samples, source)
                    found = phases[name]
                    await load.phase(
                        found, (name, str(port), keys["hostile"], options.media_model), options.samples, source
                    )
                    if options.control:
                        share = f"{min(0.99, found.cpu['attackers'] / found.seconds):.2f}"
                        await load.phase(phases[f"{name}: {BURN}"], (BURN, share), options.samples, source)
                    print(f"round {number + 1}, {name}: {ratio(phases, name):.2f}", file=sys.stderr, flush=True)
            if options.log:
                print((Path(folder) / "serve.log").read_text(errors="replace")[-options.log :], file=sys.stderr)


async def every_model_ready(server: servers.Server) -> None:
    """Wait until each model has a decode node: one that loads meanwhile would take a core of the first phases."""
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            models = (await http.get(f"{server.target.url}/ready")).json()["models"]
            if all(counts.get("decode") for counts in models.values()):
                return
            await asyncio.sleep(0.1)


def ratio(phases: dict[str, Phase], name: str, share: float = 0.95) -> float:
    """Return the time to first token relative to the phases that this phase is compared with."""
    alone = phases.get(AGAINST.get(name, ALONE), phases[ALONE])
    return phases[name].first_s(share) / alone.first_s(share)


def report(phases: dict[str, Phase]) -> str:
    """Return a Markdown table; ratios are to the phases without attack, CPU shares are of one core."""
    lines = [
        "| | streams | TTFT p50 | p95 | to alone: p50 | p95 | gaps p99 | sign of life p99 | longest "
        "| CPU: router | nodes | attackers | answers to attackers |",
        "| --- |" + " --- |" * 12,
    ]
    for name, phase in phases.items():
        if not (phase.streams and phase.alive_s and phase.seconds):
            continue
        alone = phases.get(AGAINST.get(name, ALONE), phases[ALONE])
        lost = f" ({sum(phase.errors.values())} lost: {next(iter(phase.errors))})" if phase.errors else ""
        cells = (
            f"{len(phase.streams)}{lost}",
            *(f"{1e3 * phase.first_s(share):,.0f} ms" for share in (0.5, 0.95)),
            *(f"{ratio(phases, name, share):.2f}" for share in (0.5, 0.95)),
            f"{phase.gap_s(0.99) / alone.gap_s(0.99):.2f}",
            *(f"{1e3 * found:,.0f} ms" for found in (percentile(phase.alive_s, 0.99), max(phase.alive_s))),
            *(f"{phase.cpu[kind] / phase.seconds:.2f}" for kind in ("router", "nodes", "attackers")),
            ", ".join(f"{count} x {status}" for status, count in sorted(phase.answers.items())),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=40, help="streams of the neighbour in each phase of a round")
    parser.add_argument("--rate", type=float, default=6.0, help="streams that it begins in a second")
    parser.add_argument("--only", default=",".join(ATTACKS), help="kinds of attacks")
    parser.add_argument("--control", action="store_true", help="also measure the effect of the attackers' own CPU use")
    parser.add_argument("--open", action="store_true", help="no keys: neighbour and attackers look alike")
    parser.add_argument("--serve", default="", help="further flags of kvferry serve")
    parser.add_argument(
        "--media-model", default="", help="model of --serve that pictures are sent to; empty: the only one"
    )
    parser.add_argument("--log", type=int, default=0, help="characters of the cluster's log to show in the end")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    phases: dict[str, Phase] = defaultdict(Phase)
    try:
        asyncio.run(measure(parse(), phases))
    except (LoadError, servers.StartError) as error:
        sys.exit(str(error))
    finally:
        print(report(phases), flush=True)


if __name__ == "__main__":
    main()
