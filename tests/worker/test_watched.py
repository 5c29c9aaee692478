"""What counts as a thread's standing still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.protocol.lease import Rates
from kvferry.worker.watchdog import ThreadLiveness, WatchedThread


def test_time_without_a_core_is_not_held_against_a_thread() -> None:
    """A storm of clients that left had two busy cores keep the link from its own for three seconds: its node ended."""
    marks, held = [1], [5.0]
    thread = WatchedThread(lambda: marks[0], lambda: held[0])
    thread.check(100.0)
    held[0] += 2.5
    thread.check(103.0)
    assert thread.still_s == 0.5
    thread.check(105.0)
    assert thread.still_s == 2.5
    marks[0] += 1
    thread.check(106.0)
    assert thread.still_s == 0.0
    held[0] += 3.0
    thread.check(107.0)
    assert thread.still_s == 0.0


def test_a_thread_with_nothing_to_do_stands_still_for_no_time() -> None:
    mark: list[int | None] = [1]
    thread = WatchedThread(lambda: mark[0])
    thread.check(1.0)
    thread.check(4.0)
    assert thread.still_s == 3.0
    mark[0] = None
    thread.check(9.0)
    assert thread.still_s == 0.0


def test_an_engine_without_a_core_is_slow_and_does_not_hang() -> None:
    """Nodes on a machine with too much to do ended for a turn of twenty seconds, and started anew for the next one."""
    mark, starved = [1], [7.0]
    thread = WatchedThread(lambda: mark[0], starved=lambda: starved[0])
    thread.check(100.0)
    starved[0] += 18.0
    thread.check(120.0)
    assert (thread.still_s, thread.starved_s) == (20.0, 18.0)
    mark[0] += 1
    thread.check(121.0)
    assert (thread.still_s, thread.starved_s) == (0.0, 0.0)


def test_a_step_is_compared_with_one_of_as_many_tokens() -> None:
    """A decode node that hung was suspected only after five times the time of a step full of prompts."""
    engine = SimpleNamespace(mark=1, native_id=0, step_tokens=0)
    link, loop = SimpleNamespace(heartbeat=1, native_id=0, fault=None), SimpleNamespace(ticks=1)
    rates = SimpleNamespace(rates=Rates(prefill_tokens_per_s=1000.0, step_s=0.02))
    liveness = ThreadLiveness(cast(Any, engine), cast(Any, link), cast(Any, loop), 2048, cast(Any, rates))
    assert liveness.pulse.usual_s == 0.02
    engine.step_tokens = 8
    assert liveness.pulse.usual_s == 0.02
    engine.step_tokens = 600
    assert liveness.pulse.usual_s == 0.6


def test_an_encoder_that_hangs_is_a_fault_and_an_idle_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(mark=None, native_id=0, step_tokens=0, fault=None)
    link, loop = SimpleNamespace(heartbeat=None, native_id=0, fault=None), SimpleNamespace(ticks=None)
    embeddings, rates = SimpleNamespace(mark=None), SimpleNamespace(rates=Rates())
    made: list[Any] = [engine, link, loop, 2048, rates, None, embeddings]
    liveness = ThreadLiveness(*made)
    now = [0.0]
    monkeypatch.setattr(liveness, "_clock", SimpleNamespace(tick=lambda: None, now=lambda: now[0]))
    for mark, later, hangs in ((None, 400.0, False), (1, 400.0, False), (1, 400.0, True), (2, 1.0, False)):
        embeddings.mark = mark
        now[0] += later
        liveness.check()
        assert (liveness.fault is not None) == hangs
