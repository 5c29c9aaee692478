"""Attacker: the owner of a model's files, which an operator downloads and starts.

At most `kvferry serve` ends within seconds, with a status that is not zero and one line that says what is wrong.
Nothing in the files is ever run. KVFERRY_TEST_ATTACK=long tries all kinds of damage instead of a few."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.cli.bootstrap import ERROR_PREFIX
from tests.attack.damaged_models import ALL, FEW, Damage, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KINDS = ALL if os.environ.get("KVFERRY_TEST_ATTACK") == "long" else FEW
WITHIN_S = 60.0
"""A quiet machine needs a sixth of it for damage that only a worker finds."""
STARTS = 2
"""So many processes start at a time."""


def said(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Exit status and lines of a kvferry; None: it had to be ended."""
    command = [sys.executable, "-m", "kvferry.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=WITHIN_S)
        return process.returncode, output.splitlines()
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=20)
        return None, output.splitlines()
    finally:
        process.kill()
        process.wait()


def test_a_damaged_model_is_refused_in_one_line(tmp_path: Path) -> None:
    """At most: the seconds until the line."""
    whole(tmp_path)

    def tried(damage: Damage) -> str:
        status, lines = said(["serve", "--port", "0", "--model", str(damage(tmp_path, damage.__name__))])
        told = [line for line in lines if line.startswith(ERROR_PREFIX)]
        if status != 2 or len(told) != 1 or lines[-1:] != told or "Traceback" in "".join(lines):
            return f"{damage.__name__}: {status} {lines[-5:]}"
        return ""

    with ThreadPoolExecutor(STARTS) as threads:
        wrong = [each for each in threads.map(tried, KINDS) if each]
    assert not wrong
    assert not (tmp_path / "ran").exists(), "code of the model's files was run"


def test_a_worker_alone_refuses_it_as_well(tmp_path: Path) -> None:
    """At most: the seconds until the line. It needs no Redis for it."""
    whole(tmp_path)
    for damage in [each for each in KINDS if each.__name__ in ("pipe_for_weights", "vast_layers")]:
        path = damage(tmp_path, f"alone_{damage.__name__}")
        status, lines = said(["decode", "--redis-url", "redis://127.0.0.1:1", "--model", str(path)])
        assert status == 2, lines
        assert len([line for line in lines if line.startswith(ERROR_PREFIX)]) == 1, lines
        assert "Traceback" not in "".join(lines)
