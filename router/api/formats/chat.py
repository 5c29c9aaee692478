"""ChatFormat: format of /v1/chat/completions choices, as messages or deltas."""

from __future__ import annotations

from typing import Any

from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.formats.choice_format import ChoiceFormat, Collected
from kvferry.router.api.generation import Generation
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.text.transcript import CallDelta, Entry, Piece


class ChatFormat(ChoiceFormat[ChatBody]):
    """Format of chat completion choices. Implements `router.api.formats.choice_format.ChoiceFormat`."""

    id_prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, pool: ServedModel, body: ChatBody, generation: Generation) -> None:
        super().__init__(pool, body, generation)
        self._is_legacy = body.legacy

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, {"content": text} if text else {})

    def piece_choice(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        shown = super().piece_choice(choice, piece, first=first)
        shown["finish_reason"] = self._finish_reason(piece.finish_reason)
        if piece.reasoning:
            shown["delta"] |= _reasoning(piece.reasoning)
        if piece.calls:
            shown["delta"] |= self._called([_call_delta(delta) for delta in piece.calls])
        return shown

    def opening(self, choice: Choice) -> dict[str, Any]:
        opening: dict[str, Any] = {"choices": [_choice(choice.index, {"role": "assistant", "content": ""})]}
        return {**opening, **self._prompt_ids()}

    def whole_choice(self, choice: Choice, found: Collected) -> dict[str, Any]:
        whole = {
            "index": choice.index,
            "message": self._message(found),
            "logprobs": self.logprobs(choice, found.entries, first=True),
            "finish_reason": self._finish_reason(found.finish_reason),
            "stop_reason": found.stop_reason,
        }
        if self.shows_ids:
            whole["token_ids"] = found.token_ids
        return whole

    def whole_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.prompt_top is not None:
            fields["prompt_logprobs"] = self.shown_prompt_logprobs(0)
        return {**fields, **self._prompt_ids()}

    def logprobs(self, choice: Choice, entries: list[Entry], *, first: bool) -> dict[str, Any] | None:
        return None if self.top is None else self.writer.chat(entries, self.top)

    def _message(self, found: Collected) -> dict[str, Any]:
        """Return the answer as a message; its content is null if it consists of calls only."""
        text = "".join(found.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or None if found.calls else text,
            "refusal": None,
        }
        if found.reasoning:
            message |= _reasoning("".join(found.reasoning))
        if found.calls:
            message |= self._called([_call(call) for call in found.calls.values()])
        return message

    def _called(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the field that shows calls, whole or partial; clients that sent `functions` get one call."""
        return {"function_call": calls[0]["function"]} if self._is_legacy else {"tool_calls": calls}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._is_legacy else reason

    def _prompt_ids(self) -> dict[str, Any]:
        if not self.shows_ids:
            return {}
        return {"prompt_token_ids": list(self.generation.prompts[0].token_ids)}


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under the name that most clients read, and under vLLM's newer name."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: CallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    """Return a part of a call: the first has all fields, later ones only arguments."""
    if delta.name:
        return {"index": delta.index, **_call(delta)}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


def _choice(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
