"""Runs files of Triton's cases in a process of their own: whether Triton interprets is decided when it is imported, and
no other test may inherit the choice."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
INTERPRETED = {"TRITON_INTERPRET": "1"}
ON_A_GPU: dict[str, str] = {} if torch.cuda.is_available() else INTERPRETED
"""Where there is one."""


def run_cases(environment: dict[str, str], *files: str) -> None:
    """Run them one after the other in one process, which imports PyTorch once.

    Fails with what the cases said; skips without Triton. pytest's own limit of time ends it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / file) for file in files)],
        env=inherited | environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
