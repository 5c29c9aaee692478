"""Streams write what came together at once, wait for nothing else, and hold back what their client does not take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.router.api.answer_base import Answer
from kvferry.router.api.responder import Responder
from kvferry.router.api.sequence_stream import Choice, ChoicePiece, Listener
from kvferry.router.api.write_buffer import MAX_BYTES, WriteBuffer
from kvferry.router.text.transcript import Piece
from kvferry.runtime.log import REQUEST


class Wire:
    """What was sent, write by write. While it is not `open`, nobody takes anything; `broken`: what a send raises."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.requests: list[str] = []
        self.broken: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message: Any) -> None:
        self.requests.append(REQUEST.get())
        await self.open.wait()
        if self.broken:
            raise self.broken
        if message["type"] == "http.response.body":
            self.writes.append(message["body"])


class Generated:
    """A generation whose first choice's pieces are heard while somebody listens, and iterated otherwise."""

    route = None

    def __init__(self, choices: int) -> None:
        self.listener: Listener | None = None
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.choices = [Choice(number, 0, SimpleNamespace()) for number in range(choices)]  # type: ignore[arg-type]
        self.choice = self.choices[0]

    def listen(self, listener: Listener | None, _: Any = None) -> None:
        self.listener = listener

    def put(self, text: str) -> bool:
        """Whether it was heard."""
        listener = self.listener
        if listener:
            listener(self.choice, Piece(text))
        else:
            self.queue.put_nowait(text)
        return listener is not None

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        while (text := await self.queue.get()) is not None:
            if isinstance(text, Exception):
                raise text
            yield self.choice, Piece(text)


class Plain(Answer):
    def events(self, choice: Choice, piece: Piece) -> bytes:
        return piece.text.encode()

    def closing(self) -> bytes:
        return b"."


class Stream:
    """A client's answer under way."""

    def __init__(self, choices: int = 2) -> None:
        self.generated, self.wire = Generated(choices), Wire()
        self.answer = Plain(self.generated, streams=True)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self._fold())

    async def _fold(self) -> None:
        responder, pieces = Responder(self.wire.send, "/"), self.generated.pieces()
        await self.answer.fold((self.generated.choice, Piece("a")), pieces, responder)
        await self.answer.finish(responder)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    stream = Stream()
    await turns()
    yield stream
    stream.task.cancel()
    await asyncio.wait((stream.task,))


async def test_what_is_heard_together_is_one_write_and_what_comes_later_another(stream: Stream) -> None:
    assert stream.wire.writes == [b"a"]
    assert [stream.generated.put(text) for text in "bcd"] == [True] * 3
    await turns()
    assert stream.wire.writes == [b"a", b"bcd"]
    stream.generated.put("e")
    await turns()
    assert stream.wire.writes == [b"a", b"bcd", b"e"]


async def test_what_is_heard_of_a_lone_choice_is_written_at_once() -> None:
    stream = Stream(choices=1)
    await turns()
    for text in "bcd":
        stream.generated.put(text)
        assert stream.wire.writes[-1] == text.encode()
    stream.wire.open.clear()
    assert stream.generated.put("e")
    assert not stream.generated.put("f")
    stream.wire.open.set()
    stream.generated.queue.put_nowait(None)
    await stream.task
    assert b"".join(stream.wire.writes) == b"abcdef."


@pytest.mark.parametrize("waits", [False, True])
async def test_what_is_heard_is_written_in_the_context_of_its_request(waits: bool) -> None:
    """A log line there names it."""
    told = REQUEST.set("the request")
    stream = Stream()
    REQUEST.reset(told)
    await turns()
    if waits:
        stream.wire.open.clear()
    for text in "bcd":
        stream.generated.put(text)
        await turns()
    stream.wire.open.set()
    stream.generated.queue.put_nowait(None)
    await stream.task
    assert stream.wire.requests == ["the request"] * len(stream.wire.requests)
    assert b"".join(stream.wire.writes) == b"abcd."


async def test_what_comes_last_goes_out_with_the_end(stream: Stream) -> None:
    stream.generated.queue.put_nowait("b")
    stream.generated.queue.put_nowait(None)
    await stream.task
    assert stream.wire.writes == [b"a", b"b."]


async def test_a_client_that_takes_nothing_is_waited_for_and_then_listened_for_again(stream: Stream) -> None:
    stream.wire.open.clear()
    stream.generated.put("b")
    await turns()
    assert stream.generated.put("c")
    assert not stream.generated.put("d")
    await turns()
    assert not stream.generated.put("e")
    await turns()
    assert stream.wire.writes == [b"a"]
    stream.wire.open.set()
    await turns()
    assert b"".join(stream.wire.writes) == b"abcde"
    assert stream.generated.put("f")


async def test_what_waited_is_written_although_nothing_follows(stream: Stream) -> None:
    stream.wire.open.clear()
    stream.generated.put("b")
    await turns()
    stream.generated.put("c")
    stream.wire.open.set()
    await turns()
    assert stream.wire.writes == [b"a", b"b", b"c"]


async def test_the_end_waits_for_a_client_that_takes_nothing(stream: Stream) -> None:
    stream.wire.open.clear()
    stream.generated.put("b")
    await turns()
    stream.generated.put("c")
    stream.generated.queue.put_nowait(None)
    await turns()
    assert not stream.task.done()
    stream.wire.open.set()
    await stream.task
    assert b"".join(stream.wire.writes) == b"abc."


async def test_an_error_comes_behind_what_was_heard(stream: Stream) -> None:
    stream.wire.open.clear()
    stream.generated.put("b")
    await turns()
    stream.generated.put("c")
    stream.generated.queue.put_nowait(ValueError("no more"))
    await turns()
    stream.wire.open.set()
    with pytest.raises(ValueError, match="no more"):
        await stream.task
    assert b"".join(stream.wire.writes) == b"abc"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_write_that_fails_ends_the_stream(stream: Stream, waits: bool) -> None:
    if waits:
        stream.wire.open.clear()
    stream.wire.broken = OSError("no such socket")
    stream.generated.put("b")
    await turns()
    stream.wire.open.set()
    await turns()
    stream.generated.put("c")
    assert not stream.generated.put("d")
    with pytest.raises(OSError, match="no such socket"):
        await asyncio.wait_for(stream.task, 5)
    assert stream.wire.writes == [b"a"]


@pytest.mark.parametrize("waits", ["for the next piece", "for the client"])
async def test_after_a_cancel_nothing_is_written(stream: Stream, waits: str) -> None:
    stream.wire.open.clear()
    stream.generated.put("b")
    await turns()
    stream.generated.put("c")
    if waits == "for the client":
        stream.generated.put("d")
        await turns()
    stream.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
    stream.wire.open.set()
    await turns()
    assert stream.wire.writes == [b"a"]


async def ended_write() -> tuple[Wire, WriteBuffer]:
    """A slow client takes `a` in this turn of the loop, which the stream has not heard of, and `b` is behind it."""
    wire = Wire()
    wire.open.clear()
    held = WriteBuffer(Responder(wire.send, "/"))
    held.add(b"a")
    await turns()
    held.add(b"b")
    wire.open.set()
    return wire, held


async def test_a_write_that_ended_in_this_turn_of_the_loop_is_not_waited_for() -> None:
    """That would be forever, and without a pause."""
    wire, held = await ended_write()
    await asyncio.create_task(held.flush())
    assert b"".join(wire.writes) == b"ab"


async def test_a_write_that_ended_says_nothing_of_the_one_behind_it() -> None:
    wire, held = await ended_write()
    wire.open.clear()
    flush = asyncio.create_task(held.flush())
    await turns()
    assert not held.add(b"c")
    wire.open.set()
    await flush
    assert wire.writes == [b"a", b"b", b"c"]


async def test_much_is_written_before_the_end() -> None:
    wire = Wire()
    held = WriteBuffer(Responder(wire.send, "/"))
    for _ in range(100):
        if not held.add(b"x" * 4096):
            await held.flush()
    await held.flush()
    assert max(map(len, wire.writes)) <= MAX_BYTES
    assert sum(map(len, wire.writes)) == 100 * 4096
