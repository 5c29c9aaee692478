"""Measures a cluster of random weights on this machine's GPUs: one process, and one prefill and one decode process.

    python -m benchmarks.gpu_cluster [--tiny] [--rows FILE]

Prompts are random, so none of them is cached; outputs have a fixed length. On one GPU both processes take turns: the
figures show that and how blocks arrive, but not what separate prefill and decode GPUs gain. The servers' logs stay
beside the rows; with UCX_PROTO_INFO=y they name the lanes of UCX."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_models import LARGE, TINY, write_model
from benchmarks.gpu_rows import Rows
from benchmarks.load import Completion, Target, complete
from benchmarks.servers import Server, free_port, hidden_percent, running
from benchmarks.subjects import APART, TOGETHER, Launch


@dataclass(frozen=True, slots=True)
class Sizes:
    """loads: (streams at once, prompt tokens, output tokens)."""

    config: dict[str, Any]
    options: tuple[str, ...]
    loads: tuple[tuple[int, int, int], ...]


FULL = Sizes(LARGE, ("--device", "cuda"), ((1, 2048, 128), (1, 8192, 16), (32, 2048, 128), (64, 256, 128)))
SMALL = Sizes(TINY, ("--device", "cpu", "--kv-cache-gib", "0.05", "--threads", "1"), ((1, 40, 8), (3, 40, 8)))
LAYOUTS = {"one process": TOGETHER, "1 + 1": APART}
"""Processes of the cluster, by the name in the rows."""


def launch(model: Path, options: Sequence[str], port: int) -> Launch:
    serve = (sys.executable, "-m", "kvferry.cli.main", "serve", "--port", str(port), "--log-level", "warning")
    given = ("--model", str(model), "--load-format", "dummy", "--dtype", "bfloat16")
    return Launch((*serve, *given, *options), "/ready?nodes=1")


async def load(target: Target, streams: int, prompt: int, output: int, vocab: int) -> tuple[list[Completion], float]:
    """Run completions at once; return them and the seconds until the last of them ended."""
    source = random.Random(streams * 1_000_003 + prompt)
    prompts = [source.choices(range(256, vocab), k=prompt) for _ in range(streams)]
    began = time.perf_counter()
    done = await asyncio.gather(*(complete(target, each, output) for each in prompts))
    return list(done), time.perf_counter() - began


def measure(server: Server, sizes: Sizes, rows: Rows, layout: str) -> None:
    rows.put(f"{layout}: until ready", f"{server.ready_s:.1f} s")
    vocab = sizes.config["vocab_size"]
    asyncio.run(load(server.target, 1, sizes.loads[0][1] + 1, 4, vocab))
    for streams, prompt, output in sizes.loads:
        done, took = asyncio.run(load(server.target, streams, prompt, output, vocab))
        first = statistics.median(each.first_s for each in done)
        what = f"{layout}: {streams} x {prompt} in, {output} out"
        apart = statistics.median((each.arrivals[-1] - each.arrivals[0]) / (output - 1) for each in done)
        figure = f"first token {first * 1e3:.0f} ms, others {apart * 1e3:.1f} ms apart, "
        figure += f"{streams * output / took:.0f} tokens/s"
        rows.put(what, figure)
        print(f"{what:45} {figure}", flush=True)
    for name, value in hidden_percent(server).items():
        rows.put(f"{layout}: {name.replace('_', ' ')}", f"{value:.0f} %")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a cluster of two processes, of random weights")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    args = parser.parse_args(arguments)
    sizes = SMALL if args.tiny else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", sizes.config)
        for number, (layout, processes) in enumerate(LAYOUTS.items()):
            port, file = free_port(), f"cluster.server.{number}.log"
            log = args.rows.with_name(file) if args.rows else folder / file
            with running(launch(model, (*processes, *sizes.options), port), port, log) as server:
                measure(server, sizes, Rows("cluster", args.rows), layout)


if __name__ == "__main__":
    main()
