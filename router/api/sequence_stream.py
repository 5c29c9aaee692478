"""SequenceStream: turns the token stream of one choice into text pieces, counts its tokens and records its outputs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.model_metrics import ModelMetrics
from kvferry.router.dispatch.interface import Dispatch, Output, OutputComplete, RequestSpec, Route
from kvferry.router.text.parsers.output_parser import OutputParser, single
from kvferry.router.text.transcript import Piece, Transcript


class OutputJournal(Protocol):
    """Journal of a request."""

    def add(self, choice: int, output: Output) -> None:
        """Record an output of a choice."""

    def bind(self, choice: int, dispatch: Dispatch) -> None:
        """Record where a choice is computed."""


@dataclass(slots=True)
class Choice:
    """One sequence of a response: `index` in the response, made from prompt number `prompt`.

    Its transcript is created at the first output, so that the nodes do not wait for that work. uncounted: its prompt's
    tokens are reported only with the last token. journal: records its outputs, if any. singly: tokens up to this
    number make a piece each. tools: names that it calls. timed_tokens, timed_s: tokens after the first output, and the
    seconds that they took."""

    index: int
    prompt: int
    spec: RequestSpec
    dispatch: Dispatch | None = None
    transcript: Transcript | OutputParser | None = None
    ended: bool = False
    uncounted: bool = False
    journal: OutputJournal | None = None
    singly: int = 0
    tools: tuple[str, ...] = ()
    timed_tokens: int = 0
    timed_s: float = 0.0


ChoicePiece = tuple[Choice, Piece]
Listener = Callable[[Choice, Piece], None]
TextWriter = Callable[[bytes], bool]
"""Writes a text escaped for JSON to the client; returns False, with nothing written, where a piece must be made."""


class Pieces(Protocol):
    """Asynchronous iterator of pieces that may be left early; the caller must call `aclose`."""

    def __aiter__(self) -> AsyncIterator[ChoicePiece]: ...

    def __anext__(self) -> Awaitable[ChoicePiece]: ...

    def aclose(self) -> Awaitable[None]:
        """End the iteration."""


class Whole(Protocol):
    """The request that a choice belongs to."""

    metrics: ModelMetrics

    def transcript(self, spec: RequestSpec) -> Transcript | OutputParser:
        """Return a new transcript of a sequence."""

    def count_first(self, now: float, route: Route | None) -> None:
        """Count the first output of a choice."""

    def count_late(self, choice: Choice) -> None:
        """Count a prompt whose token sources were reported only with the last token."""

    async def cancel(self, choice: Choice, *, complete: bool = False) -> None:
        """Cancel a choice's dispatch."""


class SequenceStream:
    """Iterator over the pieces of one choice.

    It is an iterator class rather than a generator: every token passes through it, and the event loop tracks
    generators."""

    def __init__(self, choice: Choice, outputs: AsyncGenerator[Output], whole: Whole) -> None:
        self._choice, self._outputs, self._whole = choice, outputs, whole
        self._metrics = whole.metrics
        self._last, self._finished = 0.0, False
        self._listener: Listener | None = None
        self._plain: tuple[Transcript, TextWriter] | None = None
        """Transcript and writer of plain text, while that needs no pieces."""
        self._end: Piece | None = None
        """Last piece, if the text ended while the listener was active."""
        self._split: list[Output] = []
        """Single tokens of an output that are not pieces yet, the next one last."""

    def __aiter__(self) -> SequenceStream:
        return self

    async def __anext__(self) -> ChoicePiece:
        choice = self._choice
        if self._finished:
            await self._whole.cancel(choice, complete=True)
            await self.aclose()
            raise StopAsyncIteration
        output = self._split.pop() if self._split else await anext(self._outputs, None)
        if output is not None:
            if choice.singly and len(output.token_ids) > 1 and self._counts_singly:
                self._split = [*single(output)][::-1]
                output = self._split.pop()
            return choice, self._piece(output)
        if self._end is not None:
            return choice, self._end
        choice.ended = True
        raise KvferryError("the request ended without a finish reason")

    def listen(self, listener: Listener | None, write: TextWriter | None = None) -> None:
        """Send pieces directly to `listener` while the iteration waits for the next one (see Dispatch.listen).

        The last piece is not sent there: a text that ends before its dispatch ends the dispatch at once. Plain text
        goes to `write` without a piece, if given. Does nothing after the end."""
        choice = self._choice
        assert choice.dispatch
        if self._finished:
            return
        self._listener, self._plain, text = listener, None, choice.transcript
        if write is not None and isinstance(text, Transcript) and text.is_plain and choice.journal is None:
            self._plain = text, write
        choice.dispatch.listen(self._receive if listener else None)

    def _receive(self, output: Output) -> None:
        if self._plain is not None and output.finish_reason is None and self._written(output, *self._plain):
            return
        listener, choice = self._listener, self._choice
        assert listener
        for each in single(output) if choice.singly and self._counts_singly else (output,):
            piece = self._piece(each)
            if self._finished:
                self._end = piece
                raise OutputComplete
            listener(choice, piece)

    def _written(self, output: Output, transcript: Transcript, write: TextWriter) -> bool:
        """Write and count an output of plain text, as most are; return False if it is not."""
        text, tokens = transcript.escaped(output.token_ids), len(output.token_ids)
        if not text or not write(text):
            return False
        transcript.completion_tokens += tokens
        self._count(time.monotonic(), tokens)
        self._metrics.output_tokens.inc(tokens)
        return True

    def _count(self, now: float, tokens: int) -> None:
        """Count the time of tokens after the first output."""
        choice, took_s = self._choice, now - self._last
        self._last = now
        self._metrics.itl.observe(took_s / tokens, tokens)
        choice.timed_tokens += tokens
        choice.timed_s += took_s

    def _piece(self, output: Output) -> Piece:
        choice = self._choice
        now, metrics = time.monotonic(), self._metrics
        transcript = choice.transcript
        if transcript is None:
            assert choice.dispatch
            transcript = choice.transcript = self._whole.transcript(choice.spec)
            self._begun(now, choice.dispatch.route, output)
        elif (tokens := len(output.token_ids)) and not output.replayed:
            self._count(now, tokens)
        self._last = now
        if choice.journal is not None:
            choice.journal.add(choice.index, output)
        piece = transcript.add(output)
        if not output.replayed:
            metrics.output_tokens.inc(len(piece.token_ids))
        if piece.calls:
            choice.tools += tuple(call.name for call in piece.calls if call.name)
        choice.ended = output.finish_reason is not None
        if choice.ended and choice.uncounted:
            self._whole.count_late(choice)
        self._finished = piece.finish_reason is not None
        if piece.finish_reason == "tool_calls" and choice.dispatch is not None and not output.replayed:
            choice.dispatch.calls_tools(choice.tools)
        return piece

    def _begun(self, now: float, route: Route | None, output: Output) -> None:
        """Count and record the first output, unless it was counted when it was computed."""
        choice = self._choice
        if output.replayed:
            return
        self._whole.count_first(now, route)
        choice.uncounted = route is not None and route.late
        if choice.journal is not None and choice.dispatch is not None:
            choice.journal.bind(choice.index, choice.dispatch)

    @property
    def _counts_singly(self) -> bool:
        choice = self._choice
        return choice.singly > (choice.transcript.completion_tokens if choice.transcript is not None else 0)

    async def aclose(self) -> None:
        """Close the token stream; left to the garbage collector, an extra task would end the dispatch."""
        await self._outputs.aclose()
