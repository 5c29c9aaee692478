"""What tests of dispatches share."""

from __future__ import annotations

import pytest

import kvferry.router.dispatch.hedging


@pytest.fixture(autouse=True)
def no_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a second may pass without anybody being late: tests of hedges say when one is."""
    monkeypatch.setattr(kvferry.router.dispatch.hedging, "MIN_LATE_S", 60.0)
