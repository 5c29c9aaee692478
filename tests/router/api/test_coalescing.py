"""Streams hold back what is followed at once, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.api.coalescing import MOST_BYTES, Held, flushing
from router.api.responder import Responder


class Wire:
    """What was sent, write by write. While `paused`, nobody takes anything."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message: Any) -> None:
        await self.open.wait()
        self.writes.append(message["body"])


async def written(source: AsyncIterator[bytes], wire: Wire) -> None:
    held = Held(Responder(wire.send, "/"))
    while (data := await flushing(anext(source, None), held.flush)) is not None:
        await held.add(data)
    await held.flush()


async def queued(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    try:
        while (data := await queue.get()) is not None:
            yield data
    finally:
        queue.put_nowait(b"closed")


async def test_what_is_at_hand_is_one_write_and_what_is_waited_for_is_another() -> None:
    queue, wire = asyncio.Queue[bytes | None](), Wire()
    for part in (b"a", b"b", b"c"):
        queue.put_nowait(part)
    writing = asyncio.create_task(written(queued(queue), wire))
    while not queue.empty() or not wire.writes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert wire.writes == [b"abc"]
    queue.put_nowait(b"d")
    while len(wire.writes) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    queue.put_nowait(b"e")
    queue.put_nowait(None)
    await writing
    assert wire.writes == [b"abc", b"d", b"e"]


async def test_much_is_written_before_the_end() -> None:
    async def many() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 4096

    wire = Wire()
    await written(many(), wire)
    assert max(map(len, wire.writes)) <= MOST_BYTES + 4096
    assert sum(map(len, wire.writes)) == 100 * 4096


@pytest.mark.parametrize("paused", [False, True])
async def test_a_cancel_reaches_the_source_wherever_it_comes(paused: bool) -> None:
    """Also while the flush waits for a client that does not read."""
    queue, wire = asyncio.Queue[bytes | None](), Wire()
    if paused:
        wire.open.clear()
    queue.put_nowait(b"a")
    source = queued(queue)
    writing = asyncio.create_task(written(source, wire))
    for _ in range(10):
        await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await queue.get() == b"closed"
    await source.aclose()  # type: ignore[attr-defined]


async def test_what_the_source_raises_comes_through() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0)
        raise ValueError("no more")

    wire = Wire()
    with pytest.raises(ValueError, match="no more"):
        await written(failing(), wire)
    assert wire.writes == [b"a"]


async def test_a_source_goes_on_after_a_wait_within_the_flush() -> None:
    queue, wire = asyncio.Queue[bytes | None](), Wire()
    wire.open.clear()
    queue.put_nowait(b"a")
    writing = asyncio.create_task(written(queued(queue), wire))
    for _ in range(10):
        await asyncio.sleep(0)
    queue.put_nowait(b"b")
    queue.put_nowait(None)
    await asyncio.sleep(0)
    wire.open.set()
    await asyncio.wait_for(writing, 30)
    assert wire.writes == [b"a", b"b"]
