"""Background tasks end with their block, and a failure is told when it happens."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.runtime import background as runtime_background
from kvferry.runtime.background import background
from tests.waiting import until


async def test_it_runs_until_the_end_of_the_block() -> None:
    steps: list[str] = []

    async def run() -> None:
        try:
            steps.append("began")
            await asyncio.sleep(60)
        finally:
            steps.append("ended")

    async with background(run(), "the task"):
        await until(lambda: steps == ["began"])
    assert steps == ["began", "ended"]


async def test_a_failure_is_in_the_log_at_once_and_raised_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """It was raised at the end alone: until then nobody knew that keys were no longer reloaded."""

    async def run() -> None:
        raise ValueError("no such thing")

    async def block() -> None:
        async with background(run(), "the task"):
            await until(lambda: caplog.messages == ["background task the task has failed"])

    with pytest.raises(ValueError, match="no such thing"):
        await block()


async def test_a_task_that_misses_a_cancellation_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router did not end: its poll of Redis was cancelled in the moment in which a write completed."""
    monkeypatch.setattr(runtime_background, "RETRY_S", 0.01)
    missed: list[str] = []

    async def run() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if missed:
                    raise
                missed.append("one")

    async with asyncio.timeout(5):
        async with background(run(), "the task"):
            await asyncio.sleep(0)
    assert missed == ["one"]
