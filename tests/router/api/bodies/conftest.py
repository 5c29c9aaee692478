"""Fixtures of tests that step through the parsing of a body by hand, without an event loop."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.router import long_work


@pytest.fixture
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of long work follow one another at once."""

    async def at_once(cost_s: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(long_work, "paced", at_once)
