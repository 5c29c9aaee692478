"""Checks and measures a GPU machine in ten minutes and prints one table last (make bench-gpu).

    python -m benchmarks.gpu [--tiny] [--only steps ...] [--seconds 600] [--keep FOLDER]

Each phase is a process with a deadline of its own, in order of worth: the test cases of the kernels (cases), whole
steps of a model of 8 billion random weights against the device's limits (steps), kernels against bandwidth and PyTorch
(kernels), alternative tiles (sweep), checksums, blocks over UCX between two processes (link), and a cluster of a
prefill and a decode process on the same weights (cluster). A phase that fails or is late keeps the rows it has written
and does not affect the others. All but link and cluster need only torch, triton and transformers; link and cluster also
need what deploy/wheelhouse.py collects. --keep: writes each phase's rows and output there as they come. --tiny runs
everything small on a CPU, to try the benchmark itself.

For a GPU that is available for fifteen minutes: `--seconds 370 --only cases steps kernels`, then `--seconds 140 --only
sweep checksums` on the same machine, then `--seconds 140 --only link cluster`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_rows import Row, read, table

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0
"""Seconds in which a late phase may end what it started."""
TAIL_CHARACTERS = 2000
"""Characters of a failed phase's output that are printed."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. module: runs it and takes --rows and --tiny; share: largest share of all seconds."""

    name: str
    module: str
    share: float


PHASES = (
    Phase("cases", "benchmarks.gpu_cases", 0.2),
    Phase("steps", "benchmarks.gpu_steps", 0.2),
    Phase("kernels", "benchmarks.gpu_kernels", 0.2),
    Phase("sweep", "benchmarks.gpu_sweep", 0.15),
    Phase("checksums", "benchmarks.gpu_checksums", 0.05),
    Phase("link", "benchmarks.gpu_link", 0.05),
    Phase("cluster", "benchmarks.gpu_cluster", 0.2),
)


def run(phase: Phase, seconds: float, options: Sequence[str], folder: Path) -> list[Row]:
    """Run a phase and return its rows, with one more that reports a failure.

    Its output goes to a file of the folder; the end of the file is printed when the phase is over."""
    rows, output = folder / f"{phase.name}.jsonl", folder / f"{phase.name}.log"
    print(f"\n{phase.name}: at most {seconds:.0f} s", flush=True)
    began = time.monotonic()
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", phase.module, "--rows", str(rows), *options],
            cwd=ROOT,
            start_new_session=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(seconds)
            failure = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failure = f"was not done after {seconds:.0f} s"
        finally:
            _end(process)
    found = [*read(rows), *([Row(phase.name, "not whole", failure)] if failure else [])]
    if failure:
        print(output.read_text(errors="replace")[-TAIL_CHARACTERS:])
    print(table(found))
    print(f"{phase.name}: {failure or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the phase and all processes of its session: SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="checks and measures a GPU machine in ten minutes")
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU: tries the benchmark itself")
    parser.add_argument("--only", nargs="+", choices=[phase.name for phase in PHASES], help="these phases alone")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all phases together")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="writes rows and output there as they come")
    args = parser.parse_args(arguments)
    chosen = [phase for phase in PHASES if not args.only or phase.name in args.only]
    shares = sum(phase.share for phase in chosen)
    options = ["--tiny"] if args.tiny else []
    with _folder(args.keep) as folder:
        found = [run(each, args.seconds * each.share / shares, options, folder) for each in chosen]
    print("\n" + table(row for rows in found for row in rows), flush=True)
    if any(row.failed for rows in found for row in rows):
        sys.exit(1)


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """Yield the folder of rows and output: `kept`, or one that is removed at the end."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
    else:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)


if __name__ == "__main__":
    main()
