"""Threads for grammars: slow jobs do not hold up the others."""

from __future__ import annotations

import os
import threading
import time

import pytest

from kvferry.protocol.errors import Overloaded
from kvferry.structured_output.compile_threads import CREDIT_S, STEPS, CompileThreads
from tests.waiting import wait_for


def test_jobs_run_in_order_on_one_thread() -> None:
    pool, done = CompileThreads("ordered"), []
    pool.submit(*[lambda i=i: done.append((i, threading.get_native_id())) for i in range(50)])  # type: ignore[misc]
    wait_for(lambda: len(done) == 50)
    assert [i for i, _ in done] == list(range(50))
    assert len({thread for _, thread in done}) == 1


def test_a_slow_job_goes_behind_and_others_pass_it() -> None:
    pool, go, done, slow = CompileThreads("passed", slow=2), threading.Event(), [], []

    def hang() -> None:
        slow.append(threading.get_native_id())
        go.wait(20)
        done.append("slow")

    pool.submit(hang)
    pool.submit(lambda: done.append("quick"))
    wait_for(lambda: done == ["quick"])
    if hasattr(os, "SCHED_IDLE"):
        assert os.sched_getscheduler(slow[0]) == os.SCHED_IDLE
    go.set()
    wait_for(lambda: done == ["quick", "slow"])
    pool.submit(lambda: done.append("after"))
    wait_for(lambda: done[-1] == "after")


def test_a_job_that_raises_ends_nothing_and_the_queue_has_a_bound() -> None:
    pool, go, done = CompileThreads("bounded", slow=0, bound=2), threading.Event(), []
    pool.submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        go.wait(20)

    pool.submit(hang)
    assert begun.wait(10)
    pool.submit(lambda: done.append(1), lambda: done.append(2))
    with pytest.raises(Overloaded, match="limit is 2"):
        pool.submit(lambda: None)
    go.set()
    wait_for(lambda: done == [1, 2])


def test_short_jobs_without_end_give_way_but_for_their_share() -> None:
    """A thousand grammars that are refused at once had taken most of a core from streams."""
    own, seen = os.getpriority(os.PRIO_PROCESS, 0), []
    pool, began, gave_way = CompileThreads("shared", share=0.1), time.monotonic(), []

    def job() -> None:
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - own)
        if seen[-1] and not gave_way:
            gave_way.append(time.monotonic() - began)

    pool.submit(*[job] * 200)
    wait_for(lambda: len(seen) == 200, 30)
    first = next(place for place, steps in enumerate(seen) if steps)
    assert 0 < first <= (CREDIT_S + 0.1 * gave_way[0]) / 0.01 + 2
    assert set(seen) == {0, STEPS}
    assert seen[first:].count(0) < 60
    for count in range(201, 221):  # after pauses, jobs have their priority back
        time.sleep(0.3)
        pool.submit(job)
        wait_for(lambda: len(seen) == count)  # noqa: B023 - awaited at once
        if seen[-1] == 0:
            break
    assert seen[-1] == 0
