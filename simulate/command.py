"""What `kvferry simulate` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import ConfigError
from simulate import picture
from simulate.compare import CASES, POLICIES, case, simulated
from simulate.figures import Figures, Goal
from simulate.fleet import Shape
from simulate.machine import Machine
from simulate.mooncake import read_trace
from simulate.workloads import Asked
from simulate.world import Loss


def simulate_command(
    machine: Machine,
    say: Callable[[str], None],
    *,
    workload: Sequence[str],
    trace: Path | None,
    policy: Sequence[str],
    prefill: int,
    decode: int,
    requests: int,
    load: float,
    seed: int,
    eviction: str,
    plot: Path | None,
    ttft: float,
    ttft_ktoken: float,
    itl: float,
) -> int:
    """Raises ConfigError."""
    goal = Goal(ttft, ttft_ktoken, itl)
    if trace and workload:
        raise ConfigError("give either a trace or workloads, not both", param="trace")
    results: dict[str, list[Figures]] = {}
    losses: Sequence[Loss] = ()
    models: tuple[str, ...] = ("m",)
    for name in [trace.stem] if trace else workload or list(CASES):
        if trace:
            asks = read_trace(trace, machine.block_size, speed=load, most=requests)
        else:
            scale = load * (prefill + decode) / 16
            asks, losses, models = case(name, Asked(requests, scale, seed, machine.block_size))
        shape = Shape(prefill, decode, machine, models, eviction)
        for each in policy or list(POLICIES):
            found = simulated(each, shape, asks, goal, losses)
            results.setdefault(name, []).append(found)
            speed = found.virtual_s / max(found.real_s, 1e-9)
            say(f"{name}, {each}: {found.goodput:.2f} requests/s within the goal; {speed:.0f} times real time")
    say("\n" + picture.table(results) + "\n" + picture.goodputs(results))
    if plot:
        _write(plot, results)
    return 0


def _write(path: Path, results: dict[str, list[Figures]]) -> None:
    try:
        path.write_text(picture.plot(results))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", param="plot") from error
