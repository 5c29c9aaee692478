"""What the command sets for a worker's libraries must not reach the tests that follow."""

from __future__ import annotations

import pytest

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OMP_WAIT_POLICY",
)


@pytest.fixture
def no_thread_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them unset, and put back afterwards whatever the test did."""
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
