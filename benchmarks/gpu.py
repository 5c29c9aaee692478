"""Measures a GPU machine in ten minutes and prints one table last (make bench-gpu).

    python -m benchmarks.gpu [--tiny] [--only steps ...] [--seconds 600]

Phases, each a process with a deadline of its own: kernels against bandwidth and PyTorch, checksums, whole steps of a
model of 8 billion random weights against the device's limits, and a cluster of a prefill and a decode process on the
same weights. What fails or is late loses what it had not measured yet, and nothing of the others. The first three need
torch, triton and transformers alone; the cluster also what deploy/wheelhouse brings. --tiny: all of it small, on a CPU,
to try the benchmark itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_rows import Row, read, table

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0
"""Seconds in which a phase that is late may end what it started."""


@dataclass(frozen=True, slots=True)
class Phase:
    """module: what runs it, which takes --rows and --tiny. share: of all seconds, the most that it may take."""

    name: str
    module: str
    share: float


PHASES = (
    Phase("kernels", "benchmarks.gpu_kernels", 0.25),
    Phase("checksums", "benchmarks.gpu_checksums", 0.1),
    Phase("steps", "benchmarks.gpu_steps", 0.35),
    Phase("cluster", "benchmarks.gpu_cluster", 0.3),
)


def run(phase: Phase, seconds: float, options: Sequence[str], folder: Path) -> list[Row]:
    """The phase's rows; if it did not end well, one more that says so."""
    rows = folder / f"{phase.name}.jsonl"
    print(f"\n{phase.name}: at most {seconds:.0f} s", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", phase.module, "--rows", str(rows), *options], cwd=ROOT, start_new_session=True
    )
    try:
        status = process.wait(seconds)
        failure = f"ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        failure = f"was not done after {seconds:.0f} s"
    finally:
        _end(process)
    print(f"{phase.name}: {failure or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    return [*read(rows), *([Row(phase.name, "not whole", failure)] if failure else [])]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The phase and all that it started in its session: asked first, then killed."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a GPU machine in ten minutes")
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU: tries the benchmark itself")
    parser.add_argument("--only", nargs="+", choices=[phase.name for phase in PHASES], help="these phases alone")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all phases together")
    asked = parser.parse_args(arguments)
    chosen = [phase for phase in PHASES if not asked.only or phase.name in asked.only]
    shares = sum(phase.share for phase in chosen)
    options = ["--tiny"] if asked.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        found = [run(each, asked.seconds * each.share / shares, options, Path(folder)) for each in chosen]
    print("\n" + table(row for rows in found for row in rows), flush=True)
    if any(row.what == "not whole" for rows in found for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
