"""A choice's dispatch ends with its pieces: at once, and by no task of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.api.sequence_stream import Choice, SequenceStream
from kvferry.router.dispatch.interface import Output, OutputComplete
from kvferry.router.text.transcript import Piece, TextOptions, Transcript
from tests.api_parts import demo_text


class Whole:
    """Of a request whose text ends with its second token."""

    def __init__(self) -> None:
        self.metrics = RouterMetrics().of("m")
        self.cancels: list[bool] = []

    def transcript(self, spec: Any) -> Any:
        return SimpleNamespace(
            add=lambda output: Piece("x", output.token_ids, finish_reason="stop" if output.token_ids == (2,) else None)
        )

    def count_first(self, now: float, route: Any) -> None:
        pass

    def count_late(self, choice: Choice) -> None:
        raise AssertionError("no account came late")

    async def cancel(self, choice: Choice, *, complete: bool = False) -> None:
        self.cancels.append(complete)


class Journey:
    """Puts out as many tokens; `over` once its iteration has ended."""

    def __init__(self, tokens: int) -> None:
        self.over, self.route = False, None
        self._tokens = tokens
        self.listener: Callable[[Output], None] | None = None

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        self.listener = listener

    async def outputs(self) -> AsyncGenerator[Output]:
        with suppress(OutputComplete):
            try:
                for token in range(self._tokens):
                    if self.listener is None:
                        yield Output((token,))
                    else:
                        self.listener(Output((token,)))
            finally:
                self.over = True


def following(tokens: int) -> tuple[SequenceStream, Journey, Whole, Choice]:
    whole, dispatch, spec = Whole(), Journey(tokens), Any
    choice = Choice(0, 0, spec, dispatch)  # type: ignore[arg-type]
    return SequenceStream(choice, dispatch.outputs(), whole), dispatch, whole, choice


async def test_a_text_that_ends_before_its_dispatch_ends_it() -> None:
    pieces, dispatch, whole, choice = following(9)
    assert [(told is choice, piece.finish_reason) async for told, piece in pieces] == [
        (True, None), (True, None), (True, "stop"),
    ]  # fmt: skip
    assert dispatch.over
    assert whole.cancels == [True]
    assert sum(whole.metrics.itl.counts) == 2


async def test_pieces_that_are_left_early_end_the_dispatch() -> None:
    pieces, dispatch, whole, _ = following(9)
    async with aclosing(pieces):
        await anext(pieces)
        assert not dispatch.over
    assert dispatch.over
    assert not whole.cancels, "that is for its request to say"


async def test_a_dispatch_that_ends_without_a_reason_is_an_error() -> None:
    pieces, _, _, choice = following(1)
    await anext(pieces)
    with pytest.raises(KvferryError, match="finish reason"):
        await anext(pieces)
    assert choice.ended


async def test_pieces_that_are_heard_count_like_those_that_are_read() -> None:
    pieces, dispatch, whole, choice = following(9)
    heard: list[tuple[bool, str]] = []
    await anext(pieces)
    pieces.listen(lambda told, piece: heard.append((told is choice, piece.text)))
    assert dispatch.listener
    for token in (5, 6):
        dispatch.listener(Output((token,)))
    assert heard == [(True, "x")] * 2
    assert sum(whole.metrics.itl.counts) == 2
    assert whole.metrics.output_tokens._value.get() == 3
    pieces.listen(None)
    assert dispatch.listener is None


async def test_plain_text_is_written_without_pieces_and_counts_like_them() -> None:
    pieces, dispatch, whole, choice = following(9)
    choice.journal = None
    text = Transcript(demo_text().tokenizer, (), SamplingParams(), TextOptions())
    whole.transcript = lambda spec: text  # type: ignore[method-assign]
    heard, written, takes = list[str](), list[bytes](), True
    await anext(pieces)
    ids = demo_text().encode(" a quiet house")

    def write(escaped: bytes) -> bool:
        written.append(escaped)
        return takes

    pieces.listen(lambda told, piece: heard.append(piece.text), write)
    assert dispatch.listener
    dispatch.listener(Output(tuple(ids[:2])))
    takes = False
    dispatch.listener(Output(tuple(ids[2:])))
    assert (written, heard) == ([b" a quiet", b" house"], [" house"])
    assert text.completion_tokens == 1 + len(ids)
    assert sum(whole.metrics.itl.counts) == choice.timed_tokens == len(ids)
    assert whole.metrics.output_tokens._value.get() == 1 + len(ids)


async def test_a_text_that_ends_while_it_is_heard_ends_its_dispatch_and_its_last_piece_is_read() -> None:
    pieces, dispatch, whole, choice = following(9)
    heard: list[Piece] = []
    await anext(pieces)
    pieces.listen(lambda told, piece: heard.append(piece))
    told, last = await anext(pieces)
    assert dispatch.over
    assert (told is choice, last.token_ids, last.finish_reason) == (True, (2,), "stop")
    assert [piece.token_ids for piece in heard] == [(1,)]
    assert [piece async for piece in pieces] == []
    assert whole.cancels == [True]
    assert sum(whole.metrics.itl.counts) == 2
