"""Frames to routers: at once when they are rare, together when they are close."""

from __future__ import annotations

import asyncio

from kvferry.engine_adapter.attempts import MAX_FRAME_S, FramePacing, frame_interval_s

STREAMS = 4
FRAME_S = frame_interval_s(STREAMS)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_token_that_comes_alone_waits_for_nothing():
    clock, sent = Clock(), list[float]()
    pacing = FramePacing(lambda: sent.append(clock.now), lambda: STREAMS, clock)
    for count in range(1, 4):
        pacing.due()
        await asyncio.sleep(0)
        assert len(sent) == count
        clock.now += 1.01 * FRAME_S


async def test_frames_that_are_due_too_early_become_one():
    sent = list[float]()
    loop = asyncio.get_running_loop()
    pacing = FramePacing(lambda: sent.append(loop.time()), lambda: STREAMS, loop.time)
    pacing.due()
    await asyncio.sleep(0)
    pacing.due()
    pacing.due()
    await asyncio.sleep(0)
    assert len(sent) == 1
    async with asyncio.timeout(5):
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(FRAME_S / 10)
    assert sent[1] - sent[0] >= FRAME_S - 1e-3  # a timer of the loop may be early by its resolution
    await asyncio.sleep(3 * FRAME_S)
    assert len(sent) == 2


def test_a_stream_that_runs_alone_waits_for_little():
    assert frame_interval_s(1) <= 1.5e-3
    assert frame_interval_s(1) < frame_interval_s(8) < frame_interval_s(100) == MAX_FRAME_S <= 4e-3
