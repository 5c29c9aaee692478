"""A node as a process: a thread that ends takes the process with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("breakable_node.py")


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    """The script, once it has said that it is ready."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *args],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert json.loads(process.stdout.readline())["status"] == "ready"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "fault"), [(signal.SIGUSR1, "the engine thread ended"), (signal.SIGUSR2, "the link thread ended")]
)
@pytest.mark.parametrize("registry", ["answers", "hung"])
def test_a_thread_that_ends_takes_its_process_with_it(number: signal.Signals, fault: str, registry: str) -> None:
    with running(registry) as process:
        began = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 1
        assert time.monotonic() - began < 1.5
        assert out == ("" if registry == "hung" else "withdrawn\n")
        assert [line for line in err.splitlines() if " ends: " in line and fault in line and "injected" in line], err


def test_a_signal_drains_and_ends_with_status_0() -> None:
    with running() as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert process.returncode == 0
        assert out == "withdrawn\n"
