"""Reads mutants of a model's files as routers and workers do, in a process with bounds on memory and time.

    python tests/file_fuzz.py HOME FIRST LAST

writes a line before it reads a mutant, and one for what came of it. `fuzzed` runs as many of those processes as it
takes, and tells what must not be: a process that died, hung or took too much, an error without a type, one that does
not say which model it is about, and one of several lines.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_CPU_S, LIMIT_S = 5.0, 120.0
"""For one mutant, of this process's CPU time and of time on a machine however busy; a whole model takes 0.02 s."""
MEMORY, ADDRESSES = 2**30, 3 * 2**30
"""Bytes of memory and of address space beyond what the process has once all is imported."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a mutant. wrong: what must not be, or empty; said: the error it was refused with.

    again: it was not read, because the process had read the same bytes before, all that there is a reader of."""

    seed: int
    done: str
    wrong: str = ""
    said: str = ""
    again: bool = False


def fuzzed(home: Path, first: int, last: int) -> Iterator[Found]:
    """Mutants first … last - 1."""
    while first < last:
        here = home / str(first)
        command = [sys.executable, str(HERE / "file_fuzz.py"), str(here), str(first), str(last)]
        env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        begun, begin = None, first
        with (home / "errors").open("w+") as errors:
            started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
            with _ended(started) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    told = json.loads(line)
                    if "wrong" not in told:
                        begun = Found(**told)
                        continue
                    begun = None
                    yield Found(**told)
                    first = told["seed"] + 1
                status = process.wait()
            errors.seek(0)
            tail = errors.read()[-3000:]
        shutil.rmtree(here, ignore_errors=True)
        if begun is not None:
            yield Found(begun.seed, begun.done, f"the process ended with {status}:\n{tail}")
            first = begun.seed + 1
        elif status or first == begin:
            raise RuntimeError(f"the fuzzing process ended with {status}:\n{tail}")


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """End the process also where who reads what it says does not go on."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def main(home: Path, first: int, last: int) -> None:
    """Read mutants until all are read, one took too much memory, or much is remembered: then it is another's turn."""
    import torch

    from tests.file_mutants import Mutants
    from tests.file_readers import FileReaders

    torch.set_num_threads(1)
    mutants, readers = Mutants(home), FileReaders()
    for whole in mutants.whole():
        outcome = readers.outcome(whole)
        assert not outcome.wrong + outcome.said, outcome
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # what is remembered lives on
    bound()
    least, ended = resident(), ""
    for seed in range(first, last):
        mutant = mutants.write(seed)
        _say(ended + json.dumps({"seed": seed, "done": mutant.done}))
        before, highest = resident(), peak()
        with timed():
            outcome = readers.outcome(mutant)
        found = Found(seed, mutant.done, outcome.wrong, outcome.said, outcome.again)
        taken = peak() - before
        if taken > MEMORY and peak() > highest:
            _say(json.dumps(asdict(found) | {"wrong": f"it took {taken >> 20} MiB. {outcome.wrong}"}))
            return
        ended = json.dumps(asdict(found)) + "\n"
        if before > least + MEMORY // 2:
            break
    _say(ended.rstrip())


def _say(lines: str) -> None:
    os.write(1, lines.encode() + b"\n")


@contextmanager
def timed() -> Iterator[None]:
    """End this process, with its stacks on standard error, if the body takes too long."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def bound() -> None:
    """Bound addresses, and prepare `timed`."""
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + ADDRESSES, resource.RLIM_INFINITY))
    for number in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.register(number, all_threads=True, chain=True)


def resident() -> int:
    """Memory of this process now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Most memory that this process has had, in bytes. That of getrusage begins with its parent's."""
    told = Path("/proc/self/status").read_text()
    return int(told.split("VmHWM:")[1].split()[0]) << 10


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
