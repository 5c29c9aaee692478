"""Accounts that do not add up are told."""

from __future__ import annotations

import pytest

from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.reuse_check import audit


def violations(reuse: Reuse | None, prompt_len: int | None = None) -> float:
    metrics = WorkerMetrics("prefill")
    audit(TokenDelta("r", 0, 0, (1,), reuse=reuse), metrics, prompt_len)
    return float(metrics.account_violations._value.get())


@pytest.mark.parametrize("reuse", [None, Reuse(10, computed=10), Reuse(10, 4, 2, 1, 3)])
def test_an_account_that_adds_up_is_nothing_to_tell(reuse: Reuse | None, caplog: pytest.LogCaptureFixture) -> None:
    assert violations(reuse) == 0
    assert violations(reuse, 10) == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("reuse", "prompt_len"),
    [(Reuse(10, computed=9), None), (Reuse(10, reused_prefill=12, computed=-2), None), (Reuse(10, computed=10), 11)],
)
def test_one_that_does_not_is_logged_and_counted(
    reuse: Reuse, prompt_len: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert violations(reuse, prompt_len) == 1
    assert "of r is wrong" in caplog.text
