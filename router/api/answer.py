"""The fold over the pieces of a generation: an answer's events or its whole body, the same for every shape."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from router.api.generation import Choice, Generation
from router.api.responder import Responder
from router.api.schemas import GenerationBody
from router.api.shape import Collected, Shape
from router.api.sse import DONE, TextEvent, event
from router.call import Call
from router.text.transcript import Piece

ChoicePiece = tuple[Choice, Piece]


class Answer:
    """`fold` takes all pieces, in the order in which they come; `finish` sends what then remains to be sent."""

    def __init__(self, call: Call, body: GenerationBody, generation: Generation, shape: Shape[Any]) -> None:
        options = body.stream_options
        self._streams = bool(body.stream)
        self._shown = body.n or 1
        self._generation = generation
        self._shape = shape
        self._base = {"id": f"{shape.id_prefix}-{call.id}", "created": int(time.time()), "model": shape.model}
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._ids = bool(body.return_token_ids)
        self._only_text = not (self._running_usage or self._ids)
        self._plain: dict[int, TextEvent] = {}
        self._collected = [Collected() for _ in generation.choices]

    async def fold(self, first: ChoicePiece, rest: AsyncIterator[ChoicePiece], responder: Responder) -> None:
        """Write the pieces as events, or collect them. Nothing is written before `first` is there."""
        if not self._streams:
            self.take(*first)
            async for choice, piece in rest:
                self.take(choice, piece)
            return
        await responder.begin_stream(self._route())
        await responder.write(self.chunk(*first))
        async for choice, piece in rest:
            data = self.chunk(choice, piece)
            if data:
                await responder.write(data)

    async def finish(self, responder: Responder) -> None:
        if self._streams:
            await responder.write(self.closing(), more=False)
        else:
            await responder.whole(200, self.body(), self._route())

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Events for a piece; empty when it has nothing to tell. Nearly every piece of a stream is text alone."""
        plain = self._plain.get(choice.index)
        if plain is None:
            return self._first(choice, piece)
        if self._only_text and piece.finish_reason is None and not piece.entries:
            return plain.fill(piece.text) if piece.text else b""
        return self._event(choice, piece) if self._tells(piece) else b""

    def closing(self) -> bytes:
        """Last events of a stream: usage if asked for, then [DONE]."""
        if not self._usage:
            return DONE
        return event({**self._chunk(), "choices": [], "usage": self._generation.usage()}) + DONE

    def take(self, choice: Choice, piece: Piece) -> None:
        self._note_prompt(choice, piece)
        self._collected[choice.index].add(piece)

    def body(self) -> dict[str, Any]:
        """The whole answer, after the last piece."""
        pairs = best(zip(self._generation.choices, self._collected, strict=True), self._shown)
        return {
            **self._base,
            "object": self._shape.whole,
            "choices": [self._shape.whole_choice(choice, found) for choice, found in pairs],
            "usage": self._generation.usage(),
            **self._shape.whole_fields(),
        }

    def _route(self) -> dict[str, str]:
        """The header that tells where the first choice went."""
        route = self._generation.route
        return {} if route is None else {"x-kvferry-route": str(route)}

    def _first(self, choice: Choice, piece: Piece) -> bytes:
        """The choice's first piece, behind what the shape opens a choice with."""
        self._note_prompt(choice, piece)
        slot = self._shape.text_choice(choice.index, TextEvent.SLOT)
        self._plain[choice.index] = TextEvent(self._with_usage({**self._chunk(), "choices": [slot]}))
        opening = self._shape.opening(choice)
        head = b"" if opening is None else event(self._with_usage({**self._chunk(), **opening}))
        if self._shape.begins_with_prompt() or self._tells(piece):
            return head + self._event(choice, piece, first=True)
        return head

    def _tells(self, piece: Piece) -> bool:
        return bool(piece.text or piece.finish_reason or piece.entries or (self._ids and piece.token_ids))

    def _event(self, choice: Choice, piece: Piece, *, first: bool = False) -> bytes:
        shown = self._shape.piece_choice(choice, piece, first=first)
        return event(self._with_usage({**self._chunk(), "choices": [shown]}))

    def _chunk(self) -> dict[str, Any]:
        """Fields that all chunks share."""
        return {**self._base, "object": self._shape.chunk}

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the field `usage`, if the client asked for it."""
        if self._usage:
            chunk["usage"] = self._generation.usage() if self._running_usage else None
        return chunk

    def _note_prompt(self, choice: Choice, piece: Piece) -> None:
        """The first choice of a prompt brings the prompt's log-probabilities for all of them."""
        if piece.prompt_logprobs is not None:
            self._shape.prompt_logprobs[choice.prompt] = piece.prompt_logprobs


def best(pairs: Iterable[tuple[Choice, Collected]], shown: int) -> list[tuple[Choice, Collected]]:
    """Of each prompt's sequences, where there are more, the `shown` with the greatest log-probability per token, best
    first; they are numbered anew."""
    by_prompt: dict[int, list[tuple[Choice, Collected]]] = {}
    for choice, found in pairs:
        by_prompt.setdefault(choice.prompt, []).append((choice, found))
    for made in by_prompt.values():
        if len(made) > shown:
            made.sort(key=lambda pair: -pair[1].mean_logprob)
    chosen = [pair for made in by_prompt.values() for pair in made[:shown]]
    return [(replace(choice, index=index), found) for index, (choice, found) in enumerate(chosen)]
