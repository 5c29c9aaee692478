"""When an engine counts as gone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvferry.engine_adapter import engine_watch
from kvferry.engine_adapter.engine import EngineLoad
from kvferry.engine_adapter.engine_watch import EngineWatch
from kvferry.protocol.errors import KvferryError, NodeDown, NodeLost
from tests.waiting import until


class SilentEngine:
    """Answers as it is told to."""

    def __init__(self, error: KvferryError | None) -> None:
        self.error, self.process, self.checks = error, "1", 0

    async def health(self) -> None:
        self.checks += 1
        if self.error is not None:
            raise self.error

    async def load(self) -> EngineLoad:
        return EngineLoad(self.process)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("HEALTH_S", 0.01), ("LOAD_S", 0.01), ("GONE_S", 0.3), ("STALLED_S", 0.1)):
        monkeypatch.setattr(engine_watch, name, seconds)


async def test_a_watch_that_was_stopped_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic engine is not asked while it changes its role, and its silence of that time does not count."""
    engine: Any = SilentEngine(None)
    watch = EngineWatch(engine, "1")
    watch.start()
    await until(lambda: engine.checks > 2)
    watch.stop()
    await asyncio.sleep(0.05)
    before = engine.checks
    engine.error = NodeLost("it does not answer")
    await asyncio.sleep(0.4)
    assert engine.checks == before
    watch.start()
    await until(lambda: engine.checks > before)
    assert not watch.fault, "it was silent for 0.4 s, while nobody asked"
    await until(lambda: bool(watch.fault))


async def watched(engine: Any, last_output_at: Any = lambda: 0.0) -> EngineWatch:
    watch = EngineWatch(engine, "1", last_output_at)
    watch.start()
    return watch


async def test_an_engine_that_is_too_busy_to_answer_but_sends_tokens_is_not_gone() -> None:
    engine, last = SilentEngine(NodeLost("no answer")), [0.0]
    watch = await watched(engine, lambda: last[0])
    try:
        for _ in range(60):
            last[0] = time.monotonic()
            await asyncio.sleep(0.01)
            assert not watch.gone.is_set()
        assert watch.still_s == 0.0
        assert engine.checks > 10
        await until(lambda: watch.still_s > 0.1)
        await until(watch.gone.is_set)
        assert "not answered" in watch.fault
    finally:
        watch.stop()


@pytest.mark.parametrize("error", [NodeLost("no answer"), NodeDown("refused")])
async def test_an_engine_that_is_silent_or_refuses_is_gone(error: KvferryError) -> None:
    watch = await watched(SilentEngine(error))
    await until(watch.gone.is_set)
    assert watch.fault


async def test_another_process_at_the_same_address_is_another_engine() -> None:
    engine = SilentEngine(None)
    watch = await watched(engine)
    await asyncio.sleep(0.05)
    assert not watch.gone.is_set()
    engine.process = "2"
    await until(watch.gone.is_set)
    assert "another process" in watch.fault
