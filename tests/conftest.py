"""Settings that hold for all tests.

The repository's root goes last on the path, so that tests import each other as `tests.…` and take kvferry from the
environment: an emulated or sanitized build must not be hidden by the sources.

OMP_WAIT_POLICY is set before any of them imports torch: OpenMP threads that spin between kernels starve the other
processes of a test on a small machine. Nothing that is tried with drawn examples is timed. Some failures are tried
again (crowded.py): the summary tells what each of them said."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1]))

from tests.alone import mark
from tests.crowded import SecondTries, send_at_once
from tests.longest import begin_first
from tests.shared_tls import share_tls_context
from tests.short_form import shorten
from tests.undisturbed_parsing import parse_undisturbed

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")
share_tls_context()
parse_undisturbed()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """After pytest-rerunfailures."""
    send_at_once(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off what collecting tests makes: modules and tests stay to the end, and searching
    through them again and again takes more than a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before -m selects."""
    config.hook.pytest_deselected(items=shorten(items))
    mark(items)
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
