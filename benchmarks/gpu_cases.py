"""Runs the test cases of the Triton kernels on the CUDA device of this machine.

    python -m benchmarks.gpu_cases [--tiny] [--rows FILE]

These are the cases that tests/kernels runs over Triton's interpreter where there is no GPU: attention, 8-bit caches,
products, draws, penalties, captured steps, whole models and streams. Each failed case writes a row when it fails; one
more row per file counts passed cases. --tiny: one file, over the interpreter, to try the benchmark."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu_rows import Rows

CASES = Path(__file__).resolve().parent.parent / "tests" / "kernels"
FILES = (
    "triton_stream_cases.py",
    "triton_cases.py",
    "triton_graph_cases.py",
    "triton_draw_cases.py",
    "triton_adjust_cases.py",
    "triton_cache_cases.py",
    "triton_latent_cases.py",
    "triton_recurrent_cases.py",
    "triton_product_cases.py",
    "triton_model_cases.py",
    "triton_ranks_cases.py",
)
TINY = ("triton_draw_cases.py",)
MAX_PROCESSES = 12
"""Maximum number of processes; each holds a CUDA context."""


class Reported:
    """Pytest plugin that writes rows as cases end."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.passed: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.nodeid.partition("::")[0]).name
        if report.when == "call" and report.passed:
            self.passed[file] += 1
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._rows.wrong(report.nodeid.rpartition("/")[2], crash.message if crash else str(report.longrepr)[-300:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._rows.wrong(f"collecting {report.nodeid}", str(report.longrepr)[-300:])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the test cases of the Triton kernels on this machine's GPU")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    args = parser.parse_args(arguments)
    if args.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    rows = Rows("cases", args.rows)
    reported = Reported(rows)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short"]
    if importlib.util.find_spec("xdist") is not None and not args.tiny:
        options += ["-n", str(min(MAX_PROCESSES, os.cpu_count() or 1))]
    files = TINY if args.tiny else FILES
    status = pytest.main([*options, *(str(CASES / name) for name in files)], plugins=[reported])
    for name, count in reported.passed.items():
        rows.put(name, f"{count} passed")
    sys.exit(int(status))


if __name__ == "__main__":
    main()
