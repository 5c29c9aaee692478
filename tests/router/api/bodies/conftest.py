"""Fixtures of tests that step through the parsing of a body by hand, without an event loop."""

from __future__ import annotations

from math import inf

import pytest

from kvferry.router import long_work


@pytest.fixture
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of long work follow one another at once."""
    monkeypatch.setattr(long_work, "MIN_SLEEP_S", inf)
