"""InfillAnswer: answer of /infill in llama.cpp's format, as one object or a stream of events."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel

from kvferry.router.api.answer_base import Answer
from kvferry.router.api.generation import Generation
from kvferry.router.api.infill.body import InfillBody
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import TextEvent, event
from kvferry.router.request_context import RequestContext
from kvferry.router.text.transcript import Piece


class InfillTimings(BaseModel):
    """Tokens computed, and milliseconds from the request's arrival to its first token, and from there to its last."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class InfillObject(BaseModel):
    """Filled-in text. `stop_type` is eos, word or limit; `tokens_cached` counts prompt tokens not computed again."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    stop_type: str
    stopping_word: str
    timings: InfillTimings


class InfillAnswer(Answer):
    """Answer of /infill: the last event of a stream holds the whole answer but its text. Implements `fold.Answer`."""

    def __init__(self, call: RequestContext, pool: ServedModel, body: InfillBody, generation: Generation) -> None:
        super().__init__(generation, streams=bool(body.stream))
        self._model, self._arrival, self._first = pool.name, call.arrival, time.monotonic()
        self._texts: list[str] = []
        self._finish: str | None = None
        self._stop: str | int | None = None
        self._plain: TextEvent | None = None

    def events(self, choice: Choice, piece: Piece) -> bytes:
        self._note(piece)
        return self._template().fill(piece.text) if piece.text else b""

    def closing(self) -> bytes:
        return event(self._end(""))

    def take(self, choice: Choice, piece: Piece) -> None:
        self._note(piece)
        self._texts.append(piece.text)

    def body(self) -> dict[str, Any]:
        return self._end("".join(self._texts))

    def _note(self, piece: Piece) -> None:
        self._finish, self._stop = piece.finish_reason, piece.stop_reason

    def _template(self) -> TextEvent:
        if self._plain is None:
            self._plain = TextEvent({"index": 0, "content": TextEvent.SLOT, "tokens": [], "id_slot": -1, "stop": False})
        return self._plain

    def _end(self, content: str) -> dict[str, Any]:
        usage, now = self.generation.usage(), time.monotonic()
        cached, word = (
            usage["prompt_tokens_details"]["cached_tokens"],
            self._stop if isinstance(self._stop, str) else "",
        )
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": cached,
            "truncated": False,
            "stop_type": "limit" if self._finish == "length" else "word" if word else "eos",
            "stopping_word": word,
            "timings": {
                "prompt_n": usage["prompt_tokens"] - cached,
                "prompt_ms": 1e3 * (self._first - self._arrival),
                "predicted_n": usage["completion_tokens"],
                "predicted_ms": 1e3 * (now - self._first),
            },
        }
