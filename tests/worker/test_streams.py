"""Standing streams: frames are kept until they were seen, and nothing is kept for a router that is gone or frozen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvferry.protocol.errors import Fenced, StreamLost
from kvferry.protocol.messages import Pulse, StepFrame, TokenDelta
from kvferry.protocol.wire import unpack
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker import streams as streams_module
from kvferry.worker.streams import KEPT_FRAMES, Reader, RouterStreams, frames

PULSE = Pulse(engine_s=0.5)
BEAT = StepFrame(number=0, pulse=PULSE)


class Clock(LoopClock):
    at = 100.0

    def now(self) -> float:
        return self.at


class Streams(RouterStreams):
    """Of epoch 7; `lost` are the routers that were given up."""

    def __init__(self) -> None:
        self.clock, self.lost, self.engine_s = Clock(), list[str](), 0.5
        super().__init__(7, lambda: Pulse(engine_s=self.engine_s), self.lost.append, self.clock)

    def emit(self, *indices: int, router: str = "a") -> None:
        for index in indices:
            self.publish(router, StepFrame((TokenDelta("r", 0, index, (1,)),)))


@pytest.fixture
def streams() -> Iterator[Streams]:
    yield (made := Streams())
    if made._timer is not None:
        made._timer.cancel()


def queued(reader: Reader) -> list[StepFrame | None]:
    found = [reader.get_nowait() for _ in range(reader.qsize())]
    return [None if data is None else unpack(data) for data in found]


def numbers(reader: Reader) -> list[int]:
    """Of the frames with content."""
    return [frame.number for frame in queued(reader) if frame is not None and frame.deltas]


async def test_a_frame_reaches_its_router_and_silence_is_a_heartbeat(streams: Streams) -> None:
    reader = frames(streams.open("a", 7, None))
    assert unpack(await anext(reader)) == BEAT
    streams.emit(0)
    assert unpack(await anext(reader)) == StepFrame((TokenDelta("r", 0, 0, (1,)),), number=1)
    assert unpack(await asyncio.wait_for(anext(reader), 2)) == StepFrame(number=1, pulse=PULSE)


async def test_a_stream_that_broke_goes_on_behind_its_last_frame(streams: Streams) -> None:
    first = streams.open("a", 7, None)
    streams.emit(0, 1, 2)
    assert numbers(first) == [1, 2, 3]
    streams.close("a", first)
    streams.emit(3)
    second = streams.open("a", 7, 2)
    streams.emit(4)
    assert numbers(second) == [3, 4, 5]
    third = streams.open("a", 7, 4)
    assert queued(second) == [None], "the older reader ends"
    assert numbers(third) == [5]
    assert streams.lost == []


@pytest.mark.parametrize(("epoch", "after"), [(8, None), (8, 2), (7, 0), (7, 4)])
async def test_what_is_not_kept_is_not_promised(streams: Streams, epoch: int, after: int | None) -> None:
    streams.open("a", 7, None)
    streams.emit(0, 1, 2)
    streams.seen("a", 2)
    with pytest.raises(StreamLost if epoch == 7 else Fenced):
        streams.open("a", epoch, after)
    with pytest.raises(StreamLost):
        streams.open("stranger", 7, 0)
    assert streams.lost == []


async def test_an_engine_that_stands_still_is_told_of_more_often(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(streams_module, "STALLED_HEARTBEAT_S", 0.001)
    reader = frames(streams.open("a", 7, None))

    async def seconds_of(beats: int) -> float:
        began = time.monotonic()
        for _ in range(beats):
            assert unpack(await anext(reader)).pulse.engine_s == streams.engine_s
        return time.monotonic() - began

    await seconds_of(1)
    assert await seconds_of(10) >= 0.18
    streams.engine_s = 1.2
    await anext(reader)
    assert min([await seconds_of(10) for _ in range(5)]) < 0.15


async def test_a_router_that_begins_anew_has_given_up_what_ran_for_it(streams: Streams) -> None:
    streams.open("a", 7, None)
    streams.emit(0)
    again = streams.open("a", 7, None)
    assert streams.lost == ["a"]
    assert queued(again) == [BEAT]
    streams.emit(1)
    assert numbers(again) == [1]


async def test_a_router_that_stays_away_is_given_up(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.01)
    streams.close("a", streams.open("a", 7, None))
    streams.clock.at += 2.0
    await asyncio.sleep(0.05)
    assert streams.lost == []
    streams.clock.at += 1.0
    await asyncio.sleep(0.05)
    assert streams.lost == ["a"]
    streams.emit(0)
    assert streams.lost == ["a", "a"], "what still runs for it is given up, too"
    assert streams._timer is None


async def test_a_router_that_acknowledges_nothing_is_frozen(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.01)
    reader = streams.open("a", 7, None)
    for _ in range(4):
        streams.clock.at += 3.0
        streams.seen("a", 0)
        await asyncio.sleep(0.03)
    assert streams.lost == []
    streams.clock.at += 5.5
    await asyncio.sleep(0.05)
    assert streams.lost == ["a"]
    assert queued(reader)[-1] is None


async def test_a_router_that_does_not_read_is_given_up(streams: Streams) -> None:
    streams.open("a", 7, None)
    streams.open("b", 7, None)
    for index in range(KEPT_FRAMES + 1):
        streams.emit(index)
        streams.emit(index, router="b")
        streams.seen("b", index)
    assert streams.lost == ["a"]


async def test_bytes_are_bounded_too(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "KEPT_BYTES", 300)
    streams.open("a", 7, None)
    streams.emit(*range(5))
    assert streams.lost == []
    streams.emit(*range(5, 20))
    assert set(streams.lost) == {"a"}


async def test_a_node_that_stops_ends_every_stream_and_opens_none(streams: Streams) -> None:
    reader = streams.open("a", 7, None)
    streams.emit(0)
    streams.stop()
    assert [frame and frame.number for frame in queued(reader)] == [0, 1, None]
    with pytest.raises(StreamLost):
        streams.open("a", 7, 1)


@pytest.mark.parametrize("ticks", range(6))
async def test_a_stream_ends_when_it_is_cancelled_as_a_frame_arrives(streams: Streams, ticks: int) -> None:
    queue = streams.open("a", 7, None)

    async def read(reader: AsyncIterator[bytes]) -> None:
        async for _ in reader:
            pass

    task = asyncio.create_task(read(frames(queue)))
    await asyncio.sleep(0.01)
    streams.emit(0)
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.2)
    task.cancel()
    assert done
