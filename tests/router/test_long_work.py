"""Long work of all requests takes a quarter of a core together, and leaves turns to others and to other sources."""

from __future__ import annotations

import asyncio
import time

from kvferry.router.long_work import SHARE, SOURCE, LongWork, paced

SLICE_S = 0.001


async def slices(count: int) -> None:
    for _ in range(count):
        await paced(SLICE_S)


async def test_all_slices_share_a_quarter_of_a_core_in_turn():
    began, ends = time.monotonic(), list[float]()

    async def work() -> None:
        await slices(20)
        ends.append(time.monotonic() - began)

    await asyncio.gather(*(work() for _ in range(3)))
    assert max(ends) > 0.9 * 57 * SLICE_S / SHARE
    assert min(ends) > 0.8 * max(ends), "none waits until another one is finished"


async def test_work_after_a_pause_begins_at_once():
    await slices(3)
    await asyncio.sleep(3 * SLICE_S / SHARE)
    work, began = LongWork(), time.monotonic()
    await work.pause()
    assert time.monotonic() - began < 0.05


async def test_only_the_works_own_cpu_time_counts():
    work = LongWork()
    time.sleep(0.2)  # noqa: ASYNC251 - as a process that was suspended
    await work.pause()
    began = time.monotonic()
    await work.pause()
    assert time.monotonic() - began < 0.1


class Crowd:
    """Works of one source without an end; `turns` counts their slices."""

    def __init__(self, source: str, works: int) -> None:
        self.turns = 0
        self._source = source
        self._tasks = [asyncio.create_task(self._work()) for _ in range(works)]

    async def _work(self) -> None:
        SOURCE.set(self._source)
        while True:
            await paced(SLICE_S)
            self.turns += 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_works_of_one_source_do_not_delay_those_of_another():
    crowds = [Crowd("a", 100), Crowd("b", 3)]
    await asyncio.sleep(0.05)
    before = [crowd.turns for crowd in crowds]
    SOURCE.set("c")
    await slices(10)
    turns = [crowd.turns - begun for crowd, begun in zip(crowds, before, strict=True)]
    for crowd in crowds:
        await crowd.stop()
    assert max(turns) <= 13, "each source has a turn for one of the third"
    assert min(turns) >= 7


async def test_cancelled_work_leaves_nothing_in_the_queue():
    crowd = Crowd("a", 300)
    await asyncio.sleep(0.05)
    await crowd.stop()
    SOURCE.set("a")
    began = time.monotonic()
    await slices(3)
    assert time.monotonic() - began < 0.3, "300 slices would take 1.2 s"
