"""`make chaos`: a cluster of real processes under load and a seeded plan of faults; the report is a table on stdout,
and report.json, pauses.txt, picture.svg and the processes' log in --out. Exit status 1 where a goal was missed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from tests.chaos import network
from tests.chaos.engines import EngineShape
from tests.chaos.look import to_look_into, traced_pauses
from tests.chaos.picture import picture
from tests.chaos.plan import ALL, BESIDE_ENGINES, ENGINE, KINDS, NETWORK
from tests.chaos.report import Run, summary, table
from tests.chaos.run import Settings, Tell, run
from tests.chaos.shape import Shape
from tests.chaos.suspicions import read_suspicions

SOAK_ROUND_S, SOAK_EVERY_S = 600.0, 120.0


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=20.0, help="how long faults happen")
@click.option("--hours", default=0.0, help="a soak: rounds of ten minutes with few faults, the books read after each")
@click.option("--seed", default=1)
@click.option("--streams", default=32)
@click.option("--every", default=3.0, help="seconds between faults")
@click.option("--calm", default=20.0, help="seconds of undisturbed load before and after")
@click.option("--model", default="tiny", help="tiny (random weights), or what kvferry's --model takes")
@click.option("--step-ms", default=30.0, help="least length of a step; 0: as fast as this machine computes")
@click.option("--disconnects", default=1000, help="clients that leave in each phase, after the faults; 0: none")
@click.option("--kinds", default="", help="names of faults, separated by commas; default: all that can be had here")
@click.option("--network/--no-network", "wanted", default=False, help="nodes in namespaces, over tcp, with cuts")
@click.option("--features/--no-features", default=False, help="with canary, fetches, tiers and roles that change")
@click.option(
    "--engines", type=click.Choice(["", "mock", "vllm"]), default="", help="nodes are adapters of such servers"
)
@click.option("--engine-python", default="python3", help="interpreter that has vLLM installed")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="default: a new directory")
def main(
    minutes: float, hours: float, seed: int, streams: int, every: float, calm: float, model: str, step_ms: float,
    disconnects: int, kinds: str, wanted: bool, features: bool, engines: str, engine_python: str, out: Path | None,
) -> None:  # fmt: skip
    if wanted and not network.possible():
        raise click.UsageError("network namespaces cannot be had here: they need root")
    out = out or Path(tempfile.mkdtemp(prefix="kvferry-chaos-"))
    out.mkdir(parents=True, exist_ok=True)
    if engines and (features or wanted):
        raise click.UsageError("engines of others have neither --features nor --network")
    known = {name: ALL[name] for name in (*BESIDE_ENGINES, *ENGINE)} if engines else KINDS | (NETWORK if wanted else {})
    chosen = tuple(name.strip() for name in kinds.split(",") if name.strip()) or tuple(
        name for name, kind in known.items() if kind.weight
    )
    if unknown := set(chosen) - set(known):
        raise click.UsageError(f"no such faults: {sorted(unknown)}; there are {sorted(known)}")
    soak = hours > 0
    shape = Shape(out, model=model, step_ms=step_ms, network=wanted, features=features)
    if engines:
        shape = replace(
            shape, engines=EngineShape(engines, engine_python), model="smollm2" if model == "tiny" else model
        )
    elif model != "tiny":
        shape = replace(shape, extra=("--dtype", "float32"))
    settings = Settings(seed, minutes * 60, streams, every, calm, disconnects, chosen)
    if soak:
        rounds = max(1, round(hours * 3600 / SOAK_ROUND_S))
        settings = replace(settings, seconds=hours * 3600 / rounds, every_s=max(every, SOAK_EVERY_S), rounds=rounds)
    began = time.monotonic()

    def tell(line: str) -> None:
        click.echo(f"{time.monotonic() - began:5.0f} s  {line}")

    sys.exit(asyncio.run(reported(shape, settings, tell)))


async def reported(shape: Shape, settings: Settings, tell: Tell) -> int:
    """Run, and write what was found, also of a run that is ended early; the exit status."""
    found, out = Run(settings.seed, settings.streams), shape.home
    running = asyncio.ensure_future(run(shape, settings, tell, found))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()
    elif not found.spans:
        return 130
    found.suspicions = read_suspicions(out / "cluster.log")
    figures = summary(found)
    figures["look"] = to_look_into(found)
    (out / "report.json").write_text(json.dumps(figures, indent=1))
    (out / "pauses.txt").write_text(traced_pauses(found, out))
    (out / "picture.svg").write_text(picture(found))
    print(table(figures))
    print(f"{time.strftime('%H:%M:%S')} {out}/report.json, pauses.txt, picture.svg, cluster.log")
    return 0 if all(figures["goals"].values()) else 1


if __name__ == "__main__":
    main()
