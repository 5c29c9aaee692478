"""ChoiceFormat: base of the formats of chat and completions choices, each as stream chunks or one whole body.

Chat and completions implement it; `ChunkAnswer` uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from kvferry.protocol.messages import TokenLogprobs
from kvferry.router.api.bodies.generating import GenerationBody
from kvferry.router.api.formats.logprobs import LogprobWriter
from kvferry.router.api.formats.system_fingerprint import system_fingerprint
from kvferry.router.api.generation import Generation
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.text.transcript import CallDelta, Entry, Piece

AnyBody = TypeVar("AnyBody", bound=GenerationBody)


@dataclass(slots=True)
class Collected:
    """All pieces of one choice, concatenated."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CallDelta] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability per token, if log-probabilities were requested."""
        return sum(entry.logprobs.logprob for entry in self.entries) / max(1, len(self.entries))

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.entries.extend(piece.entries)
        if piece.reasoning:
            self.reasoning.append(piece.reasoning)
        for delta in piece.calls:
            known = self.calls.get(delta.index)
            self.calls[delta.index] = delta if known is None else known.followed_by(delta)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class ChoiceFormat(Generic[AnyBody]):
    """Format of one answer.

    It does not keep the body, which takes 3 KiB of an open stream, except for an echo.

    id_prefix, whole, chunk  prefix of the answer's id; `object` of a whole answer and of a chunk
    prompt_logprobs          log-probabilities by prompt number, once its first piece has arrived
    """

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, pool: ServedModel, body: AnyBody, generation: Generation) -> None:
        self.shows_ids, self.prompt_top = bool(body.return_token_ids), body.prompt_logprobs
        self.model = pool.name
        self.fingerprint = system_fingerprint(pool)
        self.tokenizer = pool.text.tokenizer
        self.generation = generation
        self.top = body.top()
        self.writer = LogprobWriter(self.tokenizer, ids_as_tokens=bool(body.return_tokens_as_token_ids))
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return `choices[]` of a chunk that contains only text."""
        raise NotImplementedError

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """Return the fields of a separate chunk before the choice's first piece, or None."""
        return None

    def begins_with_prompt(self) -> bool:
        """Return whether a choice's first piece is always shown."""
        return False

    def piece_choice(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        """Return `choices[]` of a chunk for any piece; `first`: it is the choice's first."""
        shown = self.text_choice(choice.index, piece.text)
        shown["logprobs"] = self.logprobs(choice, piece.entries, first=first)
        shown["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            shown["stop_reason"] = piece.stop_reason
        if self.shows_ids:
            shown["token_ids"] = list(piece.token_ids)
        return shown

    def whole_choice(self, choice: Choice, found: Collected) -> dict[str, Any]:
        """Return `choices[]` of a whole answer."""
        raise NotImplementedError

    def whole_fields(self) -> dict[str, Any]:
        """Return further fields of a whole answer."""
        return {}

    def logprobs(self, choice: Choice, entries: list[Entry], *, first: bool) -> dict[str, Any] | None:
        """Return the field `logprobs`; None without log-probabilities."""
        raise NotImplementedError

    def shown_prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        """Return vLLM's field `prompt_logprobs` of a prompt."""
        return self.writer.prompt(self.prompt_logprobs.get(prompt, ()), self.prompt_top or 0)
