"""ChunkAnswer: answers of chat and completions, as SSE chunks that end with [DONE] or as a whole body.

A ChoiceFormat formats the choices in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvferry.router.api.answer_base import Answer
from kvferry.router.api.bodies.generating import GenerationBody
from kvferry.router.api.formats.choice_format import ChoiceFormat, Collected
from kvferry.router.api.generation import Generation
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import DONE, TextEvent, event
from kvferry.router.request_context import RequestContext
from kvferry.router.text.transcript import Piece


def chunks(choice_format: type[ChoiceFormat[Any]]) -> Callable[[RequestContext, ServedModel, Any, Generation], Answer]:
    """Return the `make_answer` of an Endpoint whose choices have this format."""

    def answer(call: RequestContext, pool: ServedModel, body: GenerationBody, generation: Generation) -> Answer:
        return ChunkAnswer(call, body, generation, choice_format(pool, body, generation))

    return answer


class ChunkAnswer(Answer):
    """Answer in chunks or as a whole. Implements `router.api.answer_base.Answer`.

    Most pieces of a stream are plain text, whose events are filled into a template made once per choice."""

    def __init__(
        self, call: RequestContext, body: GenerationBody, generation: Generation, choices: ChoiceFormat[Any]
    ) -> None:
        super().__init__(generation, streams=bool(body.stream))
        options = body.stream_options
        self._shown = body.n or 1
        self._format = choices
        self._base = {
            "id": f"{choices.id_prefix}-{call.id}",
            "created": call.identity.created,
            "model": choices.model,
            "system_fingerprint": choices.fingerprint,
        }
        if body.service_tier is not None:
            self._base["service_tier"] = body.tier_used(is_background=call.is_background)
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._ids = bool(body.return_token_ids)
        self.is_text = not (self._running_usage or self._ids)
        self._plain: dict[int, TextEvent | None] = {}
        """Event templates of the choices that have begun; None until one is needed."""
        self._collected = [] if self.streams else [Collected() for _ in generation.choices]

    def events(self, choice: Choice, piece: Piece) -> bytes:
        if choice.index not in self._plain:
            return self._first(choice, piece)
        if self.is_text and piece.finish_reason is None and not (piece.entries or piece.calls or piece.reasoning):
            return (self._plain[choice.index] or self._template(choice)).fill(piece.text) if piece.text else b""
        return self._event(choice, piece) if self._has_content(piece) else b""

    def write_text(self, text: bytes) -> bool:
        assert self.held
        template = self._plain[0] or self._template(self.generation.choices[0])
        return self.held.write_through(template.head + text + template.tail)

    def closing(self) -> bytes:
        """Return the usage, if requested, and [DONE]."""
        if not self._usage:
            return DONE
        return event({**self._chunk(), "choices": [], "usage": self.generation.usage()}) + DONE

    def take(self, choice: Choice, piece: Piece) -> None:
        self._note_prompt(choice, piece)
        self._collected[choice.index].add(piece)

    def body(self) -> dict[str, Any]:
        pairs = best(zip(self.generation.choices, self._collected, strict=True), self._shown)
        return {
            **self._base,
            "object": self._format.whole,
            "choices": [self._format.whole_choice(choice, found) for choice, found in pairs],
            "usage": self.generation.usage(),
            **self._format.whole_fields(),
        }

    def _first(self, choice: Choice, piece: Piece) -> bytes:
        """Return the events of a choice's first piece, after the choice's opening."""
        self._note_prompt(choice, piece)
        self._plain[choice.index] = None
        opening = self._format.opening(choice)
        head = b"" if opening is None else event(self._with_usage({**self._chunk(), **opening}))
        if self._format.begins_with_prompt() or self._has_content(piece):
            return head + self._event(choice, piece, first=True)
        return head

    def _template(self, choice: Choice) -> TextEvent:
        slot = self._format.text_choice(choice.index, TextEvent.SLOT)
        made = self._plain[choice.index] = TextEvent(self._with_usage({**self._chunk(), "choices": [slot]}))
        return made

    def _has_content(self, piece: Piece) -> bool:
        shown = piece.text or piece.finish_reason or piece.entries or piece.calls or piece.reasoning
        return bool(shown or (self._ids and piece.token_ids))

    def _event(self, choice: Choice, piece: Piece, *, first: bool = False) -> bytes:
        shown = self._format.piece_choice(choice, piece, first=first)
        return event(self._with_usage({**self._chunk(), "choices": [shown]}))

    def _chunk(self) -> dict[str, Any]:
        """Return the fields that all chunks share."""
        return {**self._base, "object": self._format.chunk}

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the field `usage` if the client requested it."""
        if self._usage:
            chunk["usage"] = self.generation.usage() if self._running_usage else None
        return chunk

    def _note_prompt(self, choice: Choice, piece: Piece) -> None:
        """Store the prompt's log-probabilities, which arrive with its first choice, for all its choices."""
        if piece.prompt_logprobs is not None:
            self._format.prompt_logprobs[choice.prompt] = piece.prompt_logprobs


def best(pairs: Iterable[tuple[Choice, Collected]], shown: int) -> list[tuple[Choice, Collected]]:
    """Return the `shown` best sequences of each prompt by log-probability per token, renumbered."""
    by_prompt: dict[int, list[tuple[Choice, Collected]]] = {}
    for choice, found in pairs:
        by_prompt.setdefault(choice.prompt, []).append((choice, found))
    for made in by_prompt.values():
        if len(made) > shown:
            made.sort(key=lambda pair: -pair[1].mean_logprob)
    chosen = [pair for made in by_prompt.values() for pair in made[:shown]]
    return [(replace(choice, index=index), found) for index, (choice, found) in enumerate(chosen)]
