"""MessageAnswer: answer of /v1/messages, as a message of content blocks or as the events that build it."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.errors import KvferryError
from kvferry.router.api.answer_base import Answer
from kvferry.router.api.formats.parts import CALL, REASONING, Part, Parts, Step
from kvferry.router.api.generation import Generation
from kvferry.router.api.messages.chat import MessagesChat
from kvferry.router.api.messages.errors import message_error
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import TextEvent, named_event
from kvferry.router.request_context import RequestContext
from kvferry.router.text.transcript import Piece

_PING = named_event({"type": "ping"})
_DELTAS = {
    "text": ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer(Answer):
    """Answer of the Messages API, whose blocks follow one another. Implements `router.api.answer_base.Answer`.

    A block's index is its place in the message's content."""

    def __init__(self, call: RequestContext, pool: ServedModel, chat: MessagesChat, generation: Generation) -> None:
        super().__init__(generation, streams=bool(chat.stream))
        self._id, self._model, self._stops = f"msg_{call.id}", pool.name, chat.stop
        self._tier = "batch" if call.is_background else "standard"
        self._parts = Parts()
        self._plain: tuple[Part, TextEvent] | None = None

    def opening(self) -> bytes:
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
        return named_event({"type": "message_start", "message": message}) + _PING

    def events(self, choice: Choice, piece: Piece) -> bytes:
        if self._parts.is_text(piece):
            return self._text(self._parts.grow(piece.text), piece.text) if piece.text else b""
        return b"".join(map(self._stepped, self._parts.add(piece)))

    def closing(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event(delta) + named_event({"type": "message_stop"})

    def failing(self, error: KvferryError) -> bytes:
        return named_event(message_error(error))

    def take(self, choice: Choice, piece: Piece) -> None:
        for _ in self._parts.add(piece):
            pass

    def body(self) -> dict[str, Any]:
        content = [_block(part) for part in self._parts.all]
        return {**self._message(), "content": content, **self._stop()}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "usage": {**self._usage(), "service_tier": self._tier},
        }

    def _usage(self) -> dict[str, int]:
        """Return the usage; `input_tokens` excludes cached and newly cached tokens."""
        usage = self.generation.usage()
        cached, written = usage["prompt_tokens_details"]["cached_tokens"], self.generation.used().written
        return {
            "input_tokens": usage["prompt_tokens"] - cached - written,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": written,
            "output_tokens": usage["completion_tokens"],
        }

    def _stop(self) -> dict[str, Any]:
        finish, stop = self._parts.finish_reason, self._parts.stop_reason
        if finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parts.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str) and stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _stepped(self, step: Step) -> bytes:
        what, part, text, _ = step
        match what:
            case "open":
                return named_event({"type": "content_block_start", "index": part.index, "content_block": _block(part)})
            case "grow":
                return named_event(_delta(part, text)) if text else b""
        signed = named_event(_signature(part)) if part.kind == REASONING else b""
        return signed + named_event({"type": "content_block_stop", "index": part.index})

    def _text(self, part: Part, text: str) -> bytes:
        """Return a text delta, filled into a template."""
        if self._plain is None or self._plain[0] is not part:
            self._plain = part, TextEvent(_delta(part, TextEvent.SLOT), under="content_block_delta")
        return self._plain[1].fill(text)


def _delta(part: Part, text: str) -> dict[str, Any]:
    kind, field = _DELTAS[part.kind]
    return {"type": "content_block_delta", "index": part.index, "delta": {"type": kind, field: text}}


def _signature(part: Part) -> dict[str, Any]:
    """Return the empty signature that clients expect before they send thinking back; the server does not verify it."""
    return {"type": "content_block_delta", "index": part.index, "delta": {"type": "signature_delta", "signature": ""}}


def _block(part: Part) -> dict[str, Any]:
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == CALL:
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": part.arguments()}
    return {"type": "text", "text": part.text}
