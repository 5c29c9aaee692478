"""OutputParser: parses output text into answer, reasoning and tool calls as tokens arrive; Parsing, its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.dispatch.interface import Output
from kvferry.router.text.parsers import harmony
from kvferry.router.text.parsers.call_parser import CallParser, derived_id
from kvferry.router.text.parsers.reasoning import ReasoningParser, Thinking
from kvferry.router.text.parsers.turn_parser import Reader, TurnParser
from kvferry.router.text.transcript import CallDelta, Parsed, Piece, Transcript

TAIL_TOKENS = 16
"""Number of tokens at a prompt's end that are searched for a reasoning mark."""


@dataclass(frozen=True, slots=True)
class CallParsing:
    """Parsing of tool calls, with a new parser for each sequence; None: harmony channels are read instead.

    names: the tools that may be called, with the JSON schemas of their parameters. `named`: the client named the tool,
    so the answer ends with `stop`; otherwise an answer with calls ends with `tool_calls`. `patient`: see CallParser.
    `marker`: a grammar bounds the output behind this text, or behind the token `marker_id` if that is not None."""

    parser: Callable[..., CallParser] | None
    names: Mapping[str, Any]
    patient: bool = False
    named: bool = False
    marker: str = ""
    marker_id: int | None = None


@dataclass(frozen=True, slots=True)
class Parsing:
    """Parsing options of an output.

    shown     reasoning is shown; otherwise it is counted and dropped
    channels  the output consists of messages on channels
    marks     texts in which the parsers must see special tokens"""

    thinking: Thinking | None = None
    calls: CallParsing | None = None
    shown: bool = True
    channels: bool = False
    marks: tuple[str, ...] = ()

    def reader(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> Reader:
        """Return a new reader for an output of this prompt."""
        calls, thought = self.calls, None
        if self.channels:
            names, patient = (calls.names, calls.patient) if calls is not None else ((), False)
            lead, thinks = harmony.lead(tokenizer, prompt), self.thinking is not None
            return harmony.HarmonyParser(names, patient=patient, thinks=thinks, lead=lead)
        if self.thinking is not None:
            thought = ReasoningParser(self.thinking, opened=self.opened(tokenizer, prompt))
        if calls is None or calls.parser is None:
            return TurnParser(thought, None)
        marks = () if self.thinking is None else self.thinking.begins
        parser = calls.parser(calls.names, patient=calls.patient, thoughts=marks)
        if calls.marker_id is None:
            parser.expect_grammar(calls.marker)
        return TurnParser(thought, parser)

    def opened(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> bool:
        """Return whether the output of this prompt begins within reasoning."""
        if self.thinking is None:
            return False
        return self.thinking.opened_by(tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False))


PLAIN = Parsing()
"""No parsing: the text is shown unchanged, and no parser is needed."""


class OutputParser:
    """Transcript with parsers: takes Outputs and returns parsed Pieces.

    Every token up to the end mark counts as reasoning. name: the sequence's, from which its calls' ids are derived."""

    def __init__(self, transcript: Transcript, parsing: Parsing, reader: Reader, name: str = "") -> None:
        self._transcript, self._name = transcript, name
        self._reader = reader
        self._calls = parsing.calls
        self._called = False
        self._shown = parsing.shown
        self.reasoning_tokens = 0
        self._held_tokens = 0
        """Tokens of text that is held because it may be reasoning."""

    @property
    def completion_tokens(self) -> int:
        """Return the number of completion tokens so far."""
        return self._transcript.completion_tokens

    def add(self, output: Output) -> Piece:
        """Return the parsed text that this Output completes."""
        if len(output.token_ids) < 2 or not (self._reader.may_think or self._is_marked(output.token_ids)):
            return self._read(self._transcript.add(output))
        pieces: list[Piece] = []
        for each in single(output):
            pieces.append(self._read(self._transcript.add(each)))
            if pieces[-1].finish_reason is not None:
                break
        return _joined(pieces)

    def _read(self, piece: Piece) -> Piece:
        reader, calls = self._reader, self._calls
        thinks, held = reader.thinks, reader.holds_thought
        if calls is not None and self._is_marked(piece.token_ids):
            reader.expect_grammar(calls.marker)
        found = reader.feed(piece.text)
        self._count_reasoning(piece, found, thinks=thinks, held=held)
        if piece.finish_reason is not None:
            found += reader.finish(is_whole=piece.finish_reason == "stop")
        if not self._shown:
            found = [replace(each, reasoning="") for each in found]
        if self._name:
            found = [replace(each, calls=tuple(map(self._identified, each.calls))) if each.calls else each
                     for each in found]  # fmt: skip
        _store(piece, found)
        self._called = self._called or bool(piece.calls)
        if piece.closed and self._called:  # Clients that act on calls must know that the output was cut short.
            piece.finish_reason, piece.stop_reason = "length", None
        elif piece.finish_reason == "stop" and self._called and not (calls is not None and calls.named):
            piece.finish_reason = "tool_calls"
        return piece

    def _count_reasoning(self, piece: Piece, found: Sequence[Parsed], *, thinks: bool, held: bool) -> None:
        """Count the piece's tokens if they are reasoning; thinks, held: what the reader did before it."""
        if held or self._reader.holds_thought:
            self._held_tokens += len(piece.token_ids)
        is_reasoning = any(each.reasoning for each in found)
        if is_reasoning and self._held_tokens:
            self.reasoning_tokens += self._held_tokens
            self._held_tokens = 0
        elif thinks or self._reader.thinks or is_reasoning:
            self.reasoning_tokens += len(piece.token_ids)
        if not self._reader.is_undecided:
            self._held_tokens = 0

    def _is_marked(self, token_ids: Sequence[int]) -> bool:
        """Return whether the token that opens calls is among these."""
        return self._calls is not None and self._calls.marker_id in token_ids

    def _identified(self, call: CallDelta) -> CallDelta:
        return replace(call, id=derived_id(call.id, self._name, call.index)) if call.id else call


def _store(piece: Piece, found: Sequence[Parsed]) -> None:
    """Store the parsed parts in the piece."""
    piece.text = "".join(each.text for each in found)
    piece.reasoning = "".join(each.reasoning for each in found)
    piece.calls = merged([delta for each in found for delta in each.calls])
    piece.row = tuple(found)


def merged(deltas: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Merge the deltas of each call: clients join deltas of several pieces, but not two of one piece."""
    found: dict[int, CallDelta] = {}
    for delta in deltas:
        known = found.get(delta.index)
        found[delta.index] = delta if known is None else known.followed_by(delta)
    return tuple(found.values())


def single(output: Output) -> Iterator[Output]:
    """Split an Output into one per token."""
    last = len(output.token_ids) - 1
    for place, token_id in enumerate(output.token_ids):
        yield Output(
            (token_id,),
            logprobs=None if output.logprobs is None else (output.logprobs[place],),
            finish_reason=output.finish_reason if place == last else None,
            stop_token=output.stop_token if place == last else None,
            prompt_logprobs=output.prompt_logprobs if place == 0 else None,
            replayed=output.replayed,
        )


def _joined(pieces: Sequence[Piece]) -> Piece:
    first, last = pieces[0], pieces[-1]
    joined = Piece(
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        entries=[entry for piece in pieces for entry in piece.entries],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
        closed=last.closed,
    )
    _store(joined, [found for piece in pieces for found in piece.row])
    return joined
