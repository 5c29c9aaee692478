"""Transcript: text of one sequence from its tokens: detokenised, cut at stop strings, with log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.dispatch.interface import Output
from kvferry.router.text.detokenizer import detokenizer
from kvferry.router.text.stop_strings import StopMatcher

LIMIT = "max_tokens"
"""Value of `stop_reason` if the grammar ended the text because max_tokens was near."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Display options of output text.

    `echo_only`: max_tokens was 0, so the generated token is dropped. `shown` maps special tokens that parsers read to
    text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo_only: bool = False
    shown: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """Log-probabilities of one token; `offset` is where its text begins, in characters of the output."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of a tool call.

    `index` is the call's index in the answer. `id` and `name` come with its first part. `arguments` continues the JSON
    text of the earlier parts."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def followed_by(self, delta: CallDelta) -> CallDelta:
        """Return both parts as one."""
        return CallDelta(self.index, self.id, self.name, self.arguments + delta.arguments)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Parsed part of a text: reasoning, then text, then calls; an empty part was not found.

    A call has at most one delta."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(slots=True)
class Piece:
    """Text that one Output adds.

    token_ids         tokens counted as completion, including the ending token
    stop_reason       stop string or stop token id that ended the text, or LIMIT; None for end-of-sequence and length
    closed            the grammar ended the text before max_tokens
    reasoning, calls  parts that the parsers separated from the text
    row               all parsed parts in their order; empty without parsers
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    closed: bool = False
    row: tuple[Parsed, ...] = ()


class Transcript:
    """Text of one sequence, built from a dispatch's Outputs in order.

    `completion_tokens` counts the tokens taken. After a Piece with a finish_reason nothing may be added.
    `reasoning_tokens` is None if reasoning is not parsed."""

    reasoning_tokens: int | None = None

    def __init__(
        self, tokenizer: TextTokenizer, prompt: Sequence[int], params: SamplingParams, options: TextOptions
    ) -> None:
        self._detokenizer = detokenizer(
            tokenizer, prompt, skip_special_tokens=options.skip_special_tokens, shown=options.shown
        )
        self._stop = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        self._params = params
        self._options = options
        self._offset = 0
        self.completion_tokens = 0

    def add(self, output: Output) -> Piece:
        """Return the text that this Output completes; the ending token has none unless stops are included."""
        if self._options.echo_only:
            return Piece(finish_reason="length", prompt_logprobs=output.prompt_logprobs)
        if self._stop is None and output.finish_reason is None and output.logprobs is None:
            return self._plain(output)
        piece = Piece(prompt_logprobs=output.prompt_logprobs)
        taken, texts = 0, []
        for place, token_id in enumerate(output.token_ids):
            if output.logprobs is not None:
                piece.entries.append(Entry(output.logprobs[place], self._offset))
            taken = place + 1
            ending = output.stop_token is not None and taken == len(output.token_ids)
            if not ending or self._options.include_stop:
                texts.append(self._shown(token_id, self.completion_tokens + taken))
            if self._stop is not None and self._stop.matched is not None:
                break
        piece.token_ids = output.token_ids[:taken]
        self.completion_tokens += taken
        if output.finish_reason is not None:
            texts.append(self._rest())
        piece.text = "".join(texts)
        self._finish(piece, output)
        return piece

    @property
    def is_plain(self) -> bool:
        """Return whether `escaped` may replace `add` for outputs that carry nothing but tokens."""
        return self._stop is None and self._params.logprobs is None and not self._options.echo_only

    def escaped(self, token_ids: Sequence[int]) -> bytes:
        """Return the text of plain tokens escaped for JSON, or nothing where only `add` can; see Detokenizer.

        The caller counts them in `completion_tokens` if it uses the text."""
        return self._detokenizer.escaped(token_ids)

    def _plain(self, output: Output) -> Piece:
        """Return the text of an Output without end, log-probabilities or stop strings, as nearly all are."""
        text = "".join(map(self._detokenizer.feed, output.token_ids))
        self._offset += len(text)
        self.completion_tokens += len(output.token_ids)
        return Piece(text, output.token_ids, prompt_logprobs=output.prompt_logprobs)

    def _shown(self, token_id: int, number: int) -> str:
        """Return the text of output token `number` (from 1); stop strings count from min_tokens on."""
        text = self._detokenizer.feed(token_id)
        self._offset += len(text)
        if self._stop is None or number < self._params.min_tokens:
            return text
        return self._stop.feed(text)

    def _rest(self) -> str:
        if self._stop is None:
            return self._detokenizer.finish()
        return self._stop.feed(self._detokenizer.finish()) + self._stop.finish()

    def _finish(self, piece: Piece, output: Output) -> None:
        matched = self._stop.matched if self._stop is not None else None
        if matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", matched
        elif output.finish_reason == "closed":
            piece.finish_reason, piece.stop_reason, piece.closed = "stop", LIMIT, True
        elif output.finish_reason is not None:
            piece.finish_reason = output.finish_reason
            if output.stop_token is not None and output.stop_token not in self._params.eos_token_ids:
                piece.stop_reason = output.stop_token
