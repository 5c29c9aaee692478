"""Standing token streams: one reader per router, nothing kept for a router that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_worker.streams import MAX_QUEUED_FRAMES, RouterStreams, frames
from protocol.messages import StepFrame, TokenDelta

FRAME = StepFrame((TokenDelta("r", 0, 0, (1,)),))


async def test_a_frame_reaches_its_router_and_silence_is_a_heartbeat() -> None:
    streams = RouterStreams(lambda router: None)
    reader = frames(streams.open("a"))
    assert await anext(reader) == StepFrame()
    streams.publish("a", FRAME)
    assert await anext(reader) == FRAME
    assert await asyncio.wait_for(anext(reader), 2) == StepFrame()


async def test_output_without_a_reader_gives_the_router_up() -> None:
    lost: list[str] = []
    streams = RouterStreams(lost.append)
    streams.publish("a", FRAME)
    queue = streams.open("a")
    streams.close("a", queue)
    assert lost == ["a", "a"]


async def test_a_new_stream_replaces_the_old_one_without_loss_of_the_router() -> None:
    lost: list[str] = []
    streams = RouterStreams(lost.append)
    old = streams.open("a")
    new = streams.open("a")
    assert [frame async for frame in frames(old)] == [StepFrame()]
    streams.close("a", old)
    assert lost == []
    streams.publish("a", FRAME)
    assert [new.get_nowait() for _ in range(new.qsize())] == [StepFrame(), FRAME]


async def test_a_reader_that_falls_too_far_behind_is_dropped() -> None:
    lost: list[str] = []
    streams = RouterStreams(lost.append)
    streams.open("a")
    for _ in range(MAX_QUEUED_FRAMES):
        streams.publish("a", FRAME)
    assert lost == ["a"]


@pytest.mark.parametrize("ticks", range(6))
async def test_a_stream_ends_when_it_is_cancelled_as_a_frame_arrives(ticks: int) -> None:
    queue = RouterStreams(lambda router: None).open("a")

    async def read(reader: AsyncIterator[StepFrame]) -> None:
        async for _ in reader:
            pass

    task = asyncio.create_task(read(frames(queue)))
    await asyncio.sleep(0.01)
    queue.put_nowait(FRAME)
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.2)
    task.cancel()
    assert done
