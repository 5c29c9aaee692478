"""Pieces of several choices: heard where their reader waits for them, else read in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.errors import Overloaded
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.api.choice_streams import ChoiceMerge
from kvferry.router.api.sequence_stream import Choice, SequenceStream
from kvferry.router.dispatch.interface import Output, OutputComplete, RequestSpec
from kvferry.router.dispatch.timers import EventQueue
from kvferry.router.text.transcript import Piece


class Journey:
    """Puts out what it is told to; `woken`: how often that woke who follows it. A text ends with token 0, its dispatch
    with an output of none."""

    route, fork = None, "a fork of it"

    def __init__(self) -> None:
        self.woken, self.ended = 0, False
        self._inbox: EventQueue[Output | Exception] = EventQueue()
        self._listener: Callable[[Output], None] | None = None

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        self._listener = listener

    def put(self, token: int) -> None:
        if self._listener is None or not self.woken or not self._inbox.awaited or token < 0:
            self._inbox.post(Output((token,)) if token >= 0 else Overloaded("no more"))
            return
        try:
            self._listener(Output((token,)))
        except Exception as error:
            self._inbox.post(error)

    async def outputs(self) -> AsyncIterator[Output]:
        try:
            while True:
                output = await self._inbox.next()
                self.woken += 1
                if isinstance(output, OutputComplete):
                    return
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            self.ended = True


class Request:
    """Of two prompts with as many choices each, whose texts are their tokens."""

    def __init__(self, each: int, at_once: int = 9) -> None:
        spec = RequestSpec("", "r", (), None)  # type: ignore[arg-type]
        self.choices = [Choice(index, index // each, spec) for index in range(2 * each)]
        self.metrics = RouterMetrics().of("m")
        self.dispatches: dict[int, Journey] = {}
        self.pieces = ChoiceMerge([self.choices[:each], self.choices[each:]], self._follow, at_once)
        self.read, self.heard = list[tuple[int, str]](), list[tuple[int, str]]()
        self.task = asyncio.create_task(self._read())

    def count_first(self, now: float, route: Any) -> None:
        pass

    async def cancel(self, choice: Choice, *, complete: bool = False) -> None:
        choice.ended = True

    def transcript(self, spec: Any) -> Any:
        def add(output: Output) -> Piece:
            (token,) = output.token_ids
            return Piece(str(token), output.token_ids, finish_reason=None if token else "stop")

        return SimpleNamespace(add=add)

    def hear(self, choice: Choice, piece: Piece) -> None:
        self.heard.append((choice.index, piece.text))

    async def put(self, *tokens: tuple[int, int]) -> None:
        """All in one turn of the loop, before several in which nothing comes."""
        for index, token in tokens:
            self.dispatches[index].put(token)
        for _ in range(9):
            await asyncio.sleep(0)

    def _follow(self, choice: Choice) -> SequenceStream:
        dispatch = self.dispatches[choice.index] = Journey()
        choice.dispatch = dispatch  # type: ignore[assignment]
        return SequenceStream(choice, dispatch.outputs(), self)  # type: ignore[arg-type]

    async def _read(self) -> None:
        async for choice, piece in self.pieces:
            self.read.append((choice.index, piece.text))


@pytest.fixture
async def request_of_four() -> AsyncIterator[Request]:
    made = Request(2)
    made.pieces.listen(made.hear)
    await made.put()
    await made.put((0, 1), (2, 1))
    yield made
    made.task.cancel()
    await asyncio.wait((made.task,))
    await made.pieces.aclose()
    assert all(dispatch.ended for dispatch in made.dispatches.values())


async def test_pieces_that_are_waited_for_wake_nobody(request_of_four: Request) -> None:
    request = request_of_four
    assert [choice.spec.fork_of for choice in request.choices] == [None, "a fork of it"] * 2
    await request.put((0, 2), (2, 2), (0, 3))
    await request.put((2, 3))
    assert request.heard == [(0, "2"), (2, "2"), (0, "3"), (2, "3")]
    assert request.read == [(0, "1"), (2, "1")]
    assert [request.dispatches[index].woken for index in (0, 2)] == [1, 1]


async def test_what_comes_behind_a_piece_that_is_read_is_read(request_of_four: Request) -> None:
    request = request_of_four
    request.dispatches[1].put(1)
    await asyncio.sleep(0)
    request.dispatches[0].put(2)
    await request.put((1, 2), (0, 3))
    assert request.heard == []
    assert request.read[2:] == [(1, "1"), (0, "2"), (1, "2"), (0, "3")]


async def test_without_a_listener_all_is_read_and_only_the_reader_wakes(request_of_four: Request) -> None:
    request = request_of_four
    request.pieces.listen(None)
    await request.put((0, 2), (2, 2), (0, 3))
    assert (request.heard, request.read[2:]) == ([], [(0, "2"), (2, "2"), (0, "3")])
    assert request.dispatches[0].woken == 1


async def test_a_text_that_ends_while_it_is_heard_ends_its_dispatch_alone(request_of_four: Request) -> None:
    request = request_of_four
    await request.put((0, 2), (0, 0), (2, 2))
    assert request.dispatches[0].ended
    assert (request.heard, request.read[2:]) == ([(0, "2"), (2, "2")], [(0, "0")])
    for index in (1, 2, 3):
        await request.put((index, 1))
        await request.put((index, 0))
    await request.task
    assert [found for found in request.read if found[1] == "0"] == [(0, "0"), (1, "0"), (2, "0"), (3, "0")]


async def test_what_a_listener_or_a_dispatch_raises_is_raised_to_the_reader(request_of_four: Request) -> None:
    request = request_of_four

    def broken(choice: Choice, piece: Piece) -> None:
        raise ValueError("no event for that")

    request.pieces.listen(broken)
    await request.put((0, 2))
    with pytest.raises(ValueError, match="no event"):
        await request.task
    request.task = asyncio.create_task(request._read())
    await request.put((2, -1))
    with pytest.raises(Overloaded):
        await request.task


async def test_no_more_dispatches_are_under_way_than_may_be() -> None:
    request = Request(3, at_once=2)
    await request.put()
    assert set(request.dispatches) == {0, 3}
    await request.put((0, 1), (0, 0))
    assert set(request.dispatches) == {0, 1, 3}
    await request.pieces.aclose()
    request.task.cancel()
