"""A clock that counts only the time in which somebody was there to look."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvferry.runtime.suspend_aware_clock import LoopClock, SuspendAwareClock, core_wait_s, own_core_wait_s


def test_a_pause_between_two_ticks_hardly_counts() -> None:
    time_s = [100.0]
    clock = SuspendAwareClock(0.25, lambda: time_s[0])
    for _ in range(4):
        time_s[0] += 0.25
        clock.tick()
    assert clock.now() == 1.0
    time_s[0] += 30.0
    assert clock.now() == 1.5
    clock.tick()
    time_s[0] += 0.25
    assert clock.now() == 1.75


async def test_a_loop_that_stands_still_does_not_age() -> None:
    clock = LoopClock(0.02)
    clock.start()
    began = clock.now()
    time.sleep(0.5)  # noqa: ASYNC251 - the loop is to stand still
    assert clock.now() - began < 0.1
    ticks = clock.ticks
    await asyncio.sleep(0.2)
    assert clock.ticks > ticks
    assert clock.now() - began < 0.5
    clock.stop()


def test_a_thread_that_has_no_core_is_held_up() -> None:
    """Beside twice as many processes as there are cores."""
    assert core_wait_s(None) == 0.0
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the system does not tell")
    code = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with own_core_wait_s() as own:
            before, until = core_wait_s(threading.get_native_id()), time.monotonic() + 1.0
            while time.monotonic() < until:
                pass
            assert core_wait_s(threading.get_native_id()) > before
            assert own() > before
    finally:
        for other in others:
            other.kill()
            other.wait()
