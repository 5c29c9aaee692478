"""Measures kvferry and every installed peer over their streaming APIs, against each other and the machine's limits.

    python -m benchmarks.serving [--threads 2 --runs 3 --quick --only single,prefill512 --subjects 'kvferry:*']

`make bench` runs it. Peers: llama.cpp's `llama-server` (and `llama-quantize`, which makes the demo model's other
formats) on PATH or by flag, vLLM by the interpreter that has it. Subjects with the same weights run at once and
take turns in every round, and peers that are not measured are stopped; figures are medians over the rounds, in which
the limits are measured too. It prints Markdown tables, and writes them with all samples and a plot."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks import limits, servers, table
from benchmarks.load import LoadError
from benchmarks.models import SOURCE, find_models, on_path
from benchmarks.recurrent_shapes import SHAPES
from benchmarks.subjects import ENGINES, SUBJECTS, Installed, Subject, missing
from benchmarks.workloads import FIGURES, WORKLOADS, Figures, Workload
from kvferry.cli.bootstrap import set_threads
from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.memory_needs import gguf_needs
from kvferry.model_files.weight_counts import NOWHERE, ON_CPU
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.limits import available_cores

BUSY = 0.03
"""Share of one core above which an idle server disturbs the others' figures."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores(), help="of every engine")
    parser.add_argument("--runs", type=int, default=3, help="rounds over all workloads")
    parser.add_argument("--quick", action="store_true", help="one round of bf16 and q4_0 without 32 streams")
    parser.add_argument("--only", default=",".join(FIGURES), metavar="WORKLOADS", help="default: %(default)s")
    parser.add_argument("--subjects", default="*", help="names or patterns; all: " + ",".join(s.name for s in SUBJECTS))
    parser.add_argument("--llama-server", type=Path, default=on_path("llama-server"))
    parser.add_argument("--llama-quantize", type=Path, default=on_path("llama-quantize"))
    parser.add_argument("--vllm-python", type=Path, default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="model files instead of the demo model")
    parser.add_argument("--random", nargs="+", default=[], choices=SHAPES, help="random recurrent models instead")
    parser.add_argument("--safetensors", type=Path, help="the same model as a directory, for vLLM")
    parser.add_argument("--output", type=Path, default=servers.ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    options.only, options.subjects = options.only.split(","), options.subjects.split(",")
    if options.random and options.subjects == ["*"]:
        options.subjects = [f"*:{name}" for name in options.random]
    if unknown := set(options.only) - set(FIGURES):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    if options.quick:
        options.runs = 1
        options.only = [name for name in options.only if name != "streams32"]
        options.subjects = ["*:bf16*", "*:q4_0"] if options.subjects == ["*"] else options.subjects
    return options


def say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def chosen(options: argparse.Namespace, models: dict[str, Path], installed: Installed) -> list[Subject]:
    """Return the requested subjects that can be measured here; print what is skipped and why."""
    found = []
    for subject in SUBJECTS:
        if subject.model in SHAPES and subject.model not in models:
            continue
        if not any(fnmatch(subject.name, pattern) for pattern in options.subjects):
            continue
        if reason := missing(subject, models, installed):
            say(f"{subject.name} is skipped: {reason}")
        else:
            found.append(subject)
    return found


class Group:
    """Running servers of one group; figures go into `results`."""

    def __init__(self, name: str, options: argparse.Namespace, results: table.Results, bar: tqdm) -> None:
        self._name, self._options, self._results, self._bar = name, options, results, bar
        self._servers: dict[Subject, servers.Server] = {}

    def start(self, stack: ExitStack, subject: Subject, model: Path, installed: Installed) -> None:
        """Start the server, once for each measured start, and leave it running."""
        log = self._options.output / f"{subject.name.replace(':', '-')}.log"
        starts = self._options.runs if self._wants("start", subject) else 1
        try:
            for left in reversed(range(starts)):
                self._bar.set_description(f"{subject.name} starts")
                port = servers.free_port()
                server = servers.running(ENGINES[subject.engine](subject, model, installed, port), port, log)
                if left:
                    with server as once:
                        self._results.add(subject.name, "start", {"ready_s": once.ready_s})
                else:
                    self._servers[subject] = stack.enter_context(server)
                    self._results.add(subject.name, "start", {"ready_s": self._servers[subject].ready_s})
        except servers.StartError as error:
            say(f"{subject.name} did not start, see {log}:\n{error}")

    def peers(self, besides: Subject | None = None) -> list[psutil.Process]:
        """Return the processes of other projects' servers; ours renew leases and would not survive a stop."""
        found = [each for each in self._servers.items() if each[0] is not besides and each[0].engine != "kvferry"]
        return [process for _, server in found for process in server.processes()]

    def round(self, number: int, workloads: Sequence[Workload]) -> None:
        """Run every workload on every server; each round begins with another server."""
        subjects = list(self._servers)
        subjects = subjects[number % len(subjects) :] + subjects[: number % len(subjects)] if subjects else []
        for workload in workloads:
            for subject in subjects:
                if self._wants(workload.name, subject):
                    self._run(workload, subject, f"{workload.name} {number}")

    def _run(self, workload: Workload, subject: Subject, seed: str) -> None:
        others = [p for each, server in self._servers.items() if each is not subject for p in server.processes()]
        used, began = servers.cpu_seconds(others), time.perf_counter()
        with servers.stopped(self.peers(besides=subject)):
            self._results.add(subject.name, workload.name, self._figures(workload, subject, seed))
        busy = (servers.cpu_seconds(others) - used) / (time.perf_counter() - began)
        if busy > BUSY:
            say(f"idle servers used {100 * busy:.0f} % of a core beside {subject.name}, {workload.name}")
        self._bar.update()

    def _figures(self, workload: Workload, subject: Subject, seed: str) -> Figures:
        """Return a workload's figures, empty if the server fails, so that the others are still measured."""
        self._bar.set_description(f"{subject.name} {workload.name}")
        try:
            return asyncio.run(workload.run(self._servers[subject].target, random.Random(seed)))
        except LoadError as error:
            say(f"{subject.name}, {workload.name}: {error}")
            return {}

    def finish(self) -> None:
        """Collect the figures of the processes after all rounds."""
        for subject, server in self._servers.items():
            if self._wants("ships", subject):
                self._results.add(subject.name, "ships", servers.hidden_percent(server))
            if self._wants("memory", subject):
                resident, proportional = servers.memory_gb(server.processes())
                figures = {"resident_gb": resident, "proportional_gb": proportional}
                self._results.add(subject.name, "memory", figures)

    def warm_up(self, workloads: Sequence[Workload]) -> None:
        """Run one unmeasured turn of the first workload of each subject."""
        for subject in self._servers:
            for workload in [w for w in workloads if w.name in subject.workloads][:1]:
                self._figures(workload, subject, "warm-up")

    def _wants(self, workload: str, subject: Subject) -> bool:
        return workload in self._options.only and workload in subject.workloads


def measure(
    options: argparse.Namespace,
    subjects: Sequence[Subject],
    models: dict[str, Path],
    installed: Installed,
    results: table.Results,
) -> None:
    """Fill `results` group by group, so that an interrupted run can be shown."""
    workloads = [workload for workload in WORKLOADS if workload.name in options.only]
    turns = sum(workload.name in subject.workloads for workload in workloads for subject in subjects)
    meter = _meter(installed.threads)
    with tqdm(total=turns * options.runs, unit="run") as bar:
        for name in dict.fromkeys(subject.group for subject in subjects):
            with ExitStack() as stack:
                group = Group(name, options, results, bar)
                for subject in (subject for subject in subjects if subject.group == name):
                    group.start(stack, subject, models[subject.model], installed)
                group.warm_up(workloads)
                for number in range(options.runs):
                    with servers.stopped(group.peers()):
                        for limit, value in (meter.sample() if meter else {}).items():
                            results.limits[name, limit].append(value)
                    group.round(number, workloads)
                group.finish()
            if meter:
                results.ceilings |= _ceilings(name, results, models)


def _meter(threads: int) -> limits.Meter | None:
    try:
        return limits.Meter(threads)
    except RuntimeError as error:
        say(f"{error}: the machine's limits are not measured")
        return None


def _ceilings(group: str, results: table.Results, models: dict[str, Path]) -> dict[tuple[str, str], float]:
    """Return ceilings by (group, workload), in tokens/s."""
    read, gflops = (statistics.median(results.limits[group, name]) for name in (limits.READ, limits.PRODUCTS))
    needs = gguf_needs(read_gguf(models.get(group, models[SOURCE])))
    return {
        (group, "single"): read * 1e9 / needs.step_bytes(2, NOWHERE if group == "bf16" else ON_CPU),
        (group, "prefill512"): gflops * 1e9 / needs.prompt_work(512),
        (group, "prefill2048"): gflops * 1e9 / needs.prompt_work(2048),
    }


def _machine(installed: Installed) -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = round(psutil.virtual_memory().total / 1e9)
    return {"cpu": cpu, "memory_gb": memory, "threads": installed.threads, "load": os.getloadavg()[0]}


def report(results: table.Results, subjects: Sequence[Subject]) -> str:
    machine = results.machine
    parts = [
        f"{machine['cpu']}, {machine['threads']} threads, {machine['memory_gb']} GB, load before {machine['load']:.1f}"
    ]
    for group in dict.fromkeys(subject.group for subject in subjects):
        parts.append(table.group_table(results, group, [s.name for s in subjects if s.group == group]))
    return "\n\n".join([*parts, table.goals_table(results)])


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    set_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    installed = Installed(options.llama_server, options.vllm_python, options.threads)
    try:
        given = options.gguf, options.llama_quantize, options.safetensors
        models = find_models(*given, vllm=bool(options.vllm_python), shapes=options.random)
    except ConfigError as error:
        sys.exit(str(error))
    subjects = chosen(options, models, installed)
    if not subjects:
        sys.exit("nothing to measure")
    results = table.Results(_machine(installed))
    try:
        measure(options, subjects, models, installed, results)
    except KeyboardInterrupt:
        say("interrupted: medians are over fewer rounds than requested")
    text = report(results, subjects)
    print(text)
    (options.output / "serving.md").write_text(text + "\n")
    (options.output / "serving.json").write_text(table.as_json(results))
    if not table.plot(results, options.output / "serving.png"):
        say("no plot without matplotlib")


if __name__ == "__main__":
    main()
