"""`kvferry simulate`: runs each workload or a trace under each routing policy, and prints and plots the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from kvferry.protocol.errors import ConfigError
from kvferry.simulate import plots
from kvferry.simulate.choices import check_known
from kvferry.simulate.compare import CASES, POLICIES, case, simulated
from kvferry.simulate.fleet import Shape
from kvferry.simulate.machine import Machine
from kvferry.simulate.mooncake import read_trace
from kvferry.simulate.progress import SimulationProgress
from kvferry.simulate.results import Figures, Goal
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams
from kvferry.simulate.world import Loss

LOADS = (1e-6, 1e6)
"""Bounds of the factor on a workload's usual load."""
Say = Callable[[str], None]


def simulate_command(
    machine: Machine,
    say: Say,
    *,
    workload: Sequence[str],
    trace: Path | None,
    policy: Sequence[str],
    prefill: int,
    decode: int,
    encode: int,
    requests: int,
    load: Sequence[float],
    seed: Sequence[int],
    eviction: str,
    plot: Path | None,
    ttft: float,
    ttft_ktoken: float,
    itl: float,
    targets: bool,
) -> int:
    """Simulate and print the results. Raises ConfigError for invalid arguments, before it simulates.

    targets: the goals are targets of all requests: kvferry rejects those that would miss them."""
    goal = Goal(ttft, ttft_ktoken, itl)
    if trace and workload:
        raise ConfigError("give either a trace or workloads, not both", param="trace")
    for each in workload:
        check_known("workload", each, CASES)
    for each in policy:
        check_known("policy", each, POLICIES)
    for factor in load:
        if not LOADS[0] <= factor <= LOADS[1]:
            raise ConfigError(f"load must be from {LOADS[0]:g} to {LOADS[1]:g}, not {factor}", param="load")
    if plot:
        _write(plot, "", "a")
    results: dict[str, dict[str, list[Figures]]] = {}

    def play(
        name: str, factor: float, asks: Sequence[TraceRequest], losses: Sequence[Loss], models: tuple[str, ...]
    ) -> None:
        name = f"{name} at {factor:g}" if len(load) > 1 else name
        shape = Shape(prefill, decode, machine, models, eviction, encode)
        for each in dict.fromkeys(policy or POLICIES):
            pace = SimulationProgress(f"{name}, {each}", len(asks), say)
            found = simulated(each, shape, asks, goal, losses, pace, targets=targets)
            results.setdefault(name, {}).setdefault(each, []).append(found)
            speed = found.virtual_s / max(found.real_s, 1e-9)
            say(f"{name}, {each}: {found.goodput:.2f} requests/s within the goal; {speed:.0f} times real time")
            if found.media:
                say(f"{name}, {each}: {found.media}")

    rounds = tuple(product(dict.fromkeys(load), dict.fromkeys(seed)))
    for factor in dict.fromkeys(load) if trace else ():
        assert trace
        play(trace.stem, factor, _read(trace, machine, factor, requests, say), (), ("m",))
    for name, (factor, one) in () if trace else product(dict.fromkeys(workload or CASES), rounds):
        scale = factor * (prefill + decode) / 16
        play(name, factor, *case(name, TraceParams(requests, scale, one, machine.block_size)))
    say("\n" + plots.table(results) + "\n" + plots.goodputs(results))
    if plot:
        _write(plot, plots.plot(results))
    return 0


def _read(path: Path, machine: Machine, load: float, most: int, say: Say) -> list[TraceRequest]:
    """Read the trace's requests, and say so if only the first `most` are used."""
    asks = read_trace(path, machine, speed=load, most=most)
    if len(asks) == most:
        say(f"{path}: the first {most} requests count, as --requests says")
    return asks


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="plot") from error
