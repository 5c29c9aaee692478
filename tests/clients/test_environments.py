"""The runner of other people's clients: what it says of checks that pass, fail, hang, crash, or cannot be installed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.environments import Check, Client, Outcome, run, table

OWN = Client("own", "python", (), ("own.py",), seconds=30)
FILE = """
from harness import check, raises

@check
def passes():
    print("what a client prints")

@check
async def fails():
    assert 1 == 2, "of course"

@check
def hangs():
    import time
    time.sleep(60)

@check
def raises_what_it_should():
    with raises(ZeroDivisionError) as caught:
        1 / 0
    assert "division" in str(caught[0])
"""


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(environments.CHECKS / "harness.py", tmp_path)
    monkeypatch.setattr(environments, "CHECKS", tmp_path)
    return tmp_path / "own.py"


def test_each_check_is_told(checks: Path) -> None:
    checks.write_text(FILE)
    outcome = run(OWN, "http://unused", "model", {"CHECK_SECONDS": "1"})
    told = {check.name: check for check in outcome.checks}
    assert {name: check.ok for name, check in told.items()} == {
        "passes": True, "fails": False, "hangs": False, "raises_what_it_should": True,
    }  # fmt: skip
    assert "own.py:" in told["fails"].error
    assert "of course" in told["fails"].error
    assert "more than 1 s" in told["hangs"].error


def test_a_file_that_breaks_is_a_failure(checks: Path) -> None:
    checks.write_text("import no_such_module")
    (failed,) = run(OWN, "http://unused", "model").checks
    assert not failed.ok
    assert "no_such_module" in failed.error


def test_a_client_that_does_not_end_is_ended(checks: Path) -> None:
    checks.write_text("import time\ntime.sleep(60)")
    (failed,) = run(replace(OWN, seconds=2), "http://unused", "model").checks
    assert "not within 2 s" in failed.error


@pytest.mark.parametrize("kind", ["python", "node"])
def test_what_cannot_be_installed_is_skipped_with_its_reason(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("npm_config_offline", "true")
    outcome = run(Client("gone", kind, ("kvferry-has-no-such-client",), ("x",)), "http://unused", "model")
    assert not outcome.checks
    assert outcome.skipped
    assert not (tmp_path / "gone" / "installed.json").exists()


def test_the_table() -> None:
    outcomes = [
        Outcome("a", "1.0", [Check("x", True), Check("y", False, "why")], 3.2),
        Outcome("b", skipped="npm is not installed"),
    ]
    shown = table(outcomes)
    assert "| a | 1.0 | 1 of 2 | 3 |" in shown
    assert "| b |  | skipped: npm is not installed | 0 |" in shown
