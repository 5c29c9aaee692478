"""How /v1/chat/completions looks: messages and deltas. A stream opens each choice with its role."""

from __future__ import annotations

from typing import Any

from router.api.generation import Choice
from router.api.schemas import ChatBody
from router.api.shape import Collected, Shape
from router.text.transcript import Entry


class ChatShape(Shape[ChatBody]):
    id_prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, {"content": text} if text else {})

    def opening(self, choice: Choice) -> dict[str, Any]:
        opening: dict[str, Any] = {"choices": [_choice(choice.index, {"role": "assistant", "content": ""})]}
        return {**opening, **self._prompt_ids()}

    def whole_choice(self, choice: Choice, found: Collected) -> dict[str, Any]:
        whole = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(found.text), "refusal": None},
            "logprobs": self.logprobs(choice, found.entries, first=True),
            "finish_reason": found.finish_reason,
            "stop_reason": found.stop_reason,
        }
        if self.body.return_token_ids:
            whole["token_ids"] = found.token_ids
        return whole

    def whole_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.shown_prompt_logprobs(0)
        return {**fields, **self._prompt_ids()}

    def logprobs(self, choice: Choice, entries: list[Entry], *, first: bool) -> dict[str, Any] | None:
        return None if self.top is None else self.writer.chat(entries, self.top)

    def _prompt_ids(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.generation.prompts[0].token_ids)}


def _choice(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
