"""What an endpoint gives the exchange: the sequences to generate and how their pieces are shown."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.errors import InvalidRequest
from protocol.messages import TokenLogprobs
from router.api.generation import Choice, Generation
from router.api.logprobs import LogprobWriter
from router.api.schemas import GenerationBody
from router.api.serving import Serving
from router.api.sse import DONE, event
from router.call import Call
from router.text.transcript import Entry, Piece


class Endpoint(Protocol):
    """A generating endpoint; `name` is its path, the label of its metrics."""

    name: str

    async def begin(self, data: bytes, call: Call) -> Reply:
        """Validate the body and tokenise; nothing is started yet. Raises InvalidRequest."""


@dataclass(slots=True)
class Collected:
    """All pieces of one choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.entries.extend(piece.entries)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Reply:
    """The answer under way. Streaming calls `chunk` for every piece, then `closing`; otherwise `take` for every piece,
    then `body`. Subclasses give the API's shapes."""

    def __init__(self, serving: Serving, body: GenerationBody, generation: Generation, response_id: str) -> None:
        options = body.stream_options
        self.stream = bool(body.stream)
        self.generation = generation
        self.request = body
        self.tokenizer = serving.text.tokenizer
        self.base = {"id": response_id, "created": int(time.time()), "model": serving.text.name}
        self.writer = LogprobWriter(self.tokenizer, ids_as_tokens=bool(body.return_tokens_as_token_ids))
        self.include_usage = bool(options and options.include_usage)
        self.running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        self.collected = [Collected() for _ in generation.choices]
        if body.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if body.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Events for a piece; empty when it has nothing to tell."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """The whole answer, after the last piece."""
        raise NotImplementedError

    def take(self, choice: Choice, piece: Piece) -> None:
        self.note_prompt(choice, piece)
        self.collected[choice.index].add(piece)

    def note_prompt(self, choice: Choice, piece: Piece) -> None:
        """The first choice of a prompt brings the prompt's log-probabilities for all of them."""
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs[choice.prompt] = piece.prompt_logprobs

    def closing(self) -> bytes:
        """Last events of a stream: usage if asked for, then [DONE]."""
        if not self.include_usage:
            return DONE
        return event({**self.chunk_base(), "choices": [], "usage": self.generation.usage()}) + DONE

    def chunk_base(self) -> dict[str, Any]:
        """Fields that all chunks share."""
        raise NotImplementedError

    def with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the field `usage`, if the client asked for it."""
        if self.include_usage:
            chunk["usage"] = self.generation.usage() if self.running_usage else None
        return chunk
