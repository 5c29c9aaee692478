"""Long work of all requests takes a quarter of a core together, and leaves turns to others."""

from __future__ import annotations

import asyncio
import time

from kvferry.router import long_work
from kvferry.router.long_work import SHARE, LongWork, paced

SLICE_S = 0.001


async def slices(count: int) -> None:
    for _ in range(count):
        await paced(SLICE_S)


async def test_all_slices_share_a_quarter_of_a_core_in_turn():
    await asyncio.sleep(max(0.0, long_work._Pace.free_at - time.monotonic()))
    began, ends = time.monotonic(), list[float]()

    async def work() -> None:
        await slices(20)
        ends.append(time.monotonic() - began)

    await asyncio.gather(*(work() for _ in range(3)))
    assert max(ends) > 0.9 * 57 * SLICE_S / SHARE
    assert min(ends) > 0.8 * max(ends), "none waits until another one is finished"


async def test_work_after_a_pause_begins_at_once():
    await slices(3)
    await asyncio.sleep(max(0.0, long_work._Pace.free_at - time.monotonic()))
    work, began = LongWork(), time.monotonic()
    await work.pause()
    assert time.monotonic() - began < 0.05


async def test_only_the_works_own_cpu_time_counts():
    await asyncio.sleep(max(0.0, long_work._Pace.free_at - time.monotonic()))
    work = LongWork()
    time.sleep(0.2)  # noqa: ASYNC251 - as a process that was suspended
    await work.pause()
    assert long_work._Pace.free_at - time.monotonic() < 0.1
