"""One call after another, so many at most, and none that holds up the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.kv_transfer.tiers.local import CallThread
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
HANGS = """
import threading
from kvferry.kv_transfer.tiers.local import CallThread
begun = threading.Event()
lane = CallThread("lane", 1)
lane.submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
lane.close()
"""


def test_calls_are_made_in_order_and_only_so_many_wait() -> None:
    go, made, lane = threading.Event(), list[int](), CallThread("lane", 2)

    def call(number: int) -> None:
        go.wait(10)
        made.append(number)

    taken = [lane.submit(lambda number=number: call(number)) for number in range(3)]  # type: ignore[misc]
    assert taken == [True, True, False]
    go.set()
    wait_for(lambda: made == [0, 1])
    wait_for(lambda: lane.submit(lambda: made.append(9)))
    wait_for(lambda: made == [0, 1, 9])
    lane.close()
    assert not lane.submit(lambda: made.append(10))


def test_a_call_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lane, made = CallThread("lane", 2), list[int]()
    lane.submit(lambda: made.append(1 // 0))
    lane.submit(lambda: made.append(1))
    wait_for(lambda: made == [1])
    assert "a call on lane failed" in caplog.text
    lane.close()


def test_what_waits_when_it_is_closed_is_not_made() -> None:
    go, made, lane = threading.Event(), list[int](), CallThread("lane", 2)

    def held() -> None:
        if go.wait(10):
            made.append(1)

    lane.submit(held)
    lane.submit(lambda: made.append(2))
    lane.close()
    go.set()
    wait_for(lambda: "lane" not in {thread.name for thread in threading.enumerate()})
    assert 2 not in made


def test_a_process_ends_while_a_call_hangs() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, timeout=20, check=False).returncode == 0
