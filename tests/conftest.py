"""What holds for all tests.

OMP_WAIT_POLICY is set before any of them imports torch: OpenMP threads that spin between kernels starve the other
processes of a test on a small machine. Nothing that is tried with drawn examples is timed. Some failures are tried
again (crowded.py): the summary tells what each of them said."""

import os

import pytest
from crowded import SecondTries
from hypothesis import HealthCheck, settings
from longest import begin_first

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_first(items)
    tries = SecondTries()
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=2, condition=tries.allowed))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failures = terminalreporter.stats.get("rerun", [])
    if failures:
        terminalreporter.section("tried again")
    for report in failures:
        terminalreporter.write_sep("_", report.nodeid)
        terminalreporter.write_line(report.longreprtext[-4000:])
