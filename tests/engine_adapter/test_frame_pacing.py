"""Frames to routers: at once when they are rare, together when they are close."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from kvferry.engine_adapter.frame_pacing import MAX_TURN_S, FramePacing, turn_s

STREAMS = 4
TURN_S = turn_s(STREAMS)


class Time:
    """A clock that only `sleep` and `pass_` move."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_token_that_comes_alone_waits_for_nothing():
    time, sent = Time(), list[float]()
    pacing = FramePacing(lambda: sent.append(time.now), lambda: STREAMS, time, time.sleep)
    for _ in range(3):
        pacing.due()
        await turns()
        time.now += 2 * TURN_S
    assert len(sent) == 3
    assert time.slept == []


async def test_a_frame_that_is_due_too_early_waits_for_the_rest_of_the_turn():
    time, sent = Time(), list[float]()
    pacing = FramePacing(lambda: sent.append(time.now), lambda: STREAMS, time, time.sleep)
    pacing.due()
    await turns()
    time.now += TURN_S / 3
    pacing.due()
    pacing.due()
    await turns()
    assert sent == pytest.approx([100.0, 100.0 + TURN_S])
    assert time.slept == pytest.approx([TURN_S * 2 / 3])


def test_what_became_readable_during_the_sleep_is_in_the_same_frame():
    """On the loop that adapters run on, which reads sockets before it runs what was called soon."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_read_while_sleeping())


async def _read_while_sleeping() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    loop, outbox, frames = asyncio.get_running_loop(), list[bytes](), list[list[bytes]]()
    time = Time()

    def sleep(seconds: float) -> None:
        far.send(b"second")
        time.sleep(seconds)

    def send() -> None:
        frames.append(outbox.copy())
        outbox.clear()

    pacing = FramePacing(send, lambda: STREAMS, time, sleep)

    def readable() -> None:
        outbox.append(near.recv(64))
        pacing.due()

    loop.add_reader(near, readable)
    try:
        pacing.due()
        await turns()
        far.send(b"first")
        async with asyncio.timeout(5):
            while len(frames) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert frames == [[], [b"first", b"second"]]
    finally:
        loop.remove_reader(near)
        near.close()
        far.close()


async def test_a_busy_loop_does_not_sleep():
    time, sent = Time(), list[float]()
    pacing = FramePacing(lambda: sent.append(time.now), lambda: STREAMS, time, time.sleep)
    for _ in range(5):
        pacing.due()
        time.now += TURN_S
        await turns()
    assert len(sent) == 5
    assert time.slept == []


def test_a_stream_that_runs_alone_waits_for_little():
    assert turn_s(1) <= 1.5e-3
    assert turn_s(1) < turn_s(8) < turn_s(100) == MAX_TURN_S <= 4e-3
