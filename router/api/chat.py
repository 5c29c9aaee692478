"""POST /v1/chat/completions: from messages to specs, from pieces of text to the API's chunks and bodies."""

from __future__ import annotations

from typing import Any

from protocol.errors import InvalidRequest
from router.api.generation import Choice, Generation
from router.api.reply import Reply
from router.api.sampling import check_logprobs
from router.api.schemas import ChatBody, parse, reject_unbuilt
from router.api.serving import Serving, text_options
from router.api.sse import TextEvent, event
from router.call import Call
from router.text.transcript import Entry, Piece


class ChatEndpoint:
    name = "/v1/chat/completions"

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def begin(self, data: bytes, call: Call) -> Reply:
        """See Endpoint."""
        serving, body = self._serving, parse(ChatBody, data)
        serving.check_model(body.model)
        reject_unbuilt(body)
        field, asked = _asked(body)
        if asked == 0:
            raise InvalidRequest(f"{field} must be at least 1", param=field)
        token_ids = await serving.render(body)
        spec = serving.spec(
            body,
            call,
            call.id,
            token_ids,
            asked=asked,
            asked_field=field,
            logprobs=_top(body),
            prompt_logprobs=body.prompt_logprobs,
        )
        generation = Generation(
            serving.cluster,
            serving.metrics,
            serving.text.tokenizer,
            [spec],
            text_options(body),
            n=body.n or 1,
        )
        return ChatReply(serving, body, generation, call)


def _asked(body: ChatBody) -> tuple[str, int | None]:
    """The field that bounds the output, and its value; the newer name wins."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _top(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return check_logprobs("top_logprobs", body.top_logprobs or 0)


class ChatReply(Reply):
    """Chat's shapes. A stream opens each choice with its role."""

    def __init__(self, serving: Serving, body: ChatBody, generation: Generation, call: Call) -> None:
        super().__init__(serving, body, generation, f"chatcmpl-{call.id}")
        self._top = _top(body)
        self._plain: dict[int, TextEvent] = {}

    def chunk_base(self) -> dict[str, Any]:
        return {**self.base, "object": "chat.completion.chunk"}

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        opening = b"" if choice.index in self._plain else self._open(choice)
        wants_ids = bool(self.request.return_token_ids)
        if piece.finish_reason is None and not piece.entries and not self.running_usage and not wants_ids:
            return opening + self._plain[choice.index].fill(piece.text) if piece.text else opening
        if not (piece.text or piece.finish_reason or piece.entries or (wants_ids and piece.token_ids)):
            return opening
        shown = self._choice(choice.index, {"content": piece.text} if piece.text else {})
        shown["logprobs"] = self._logprobs(piece.entries)
        shown["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            shown["stop_reason"] = piece.stop_reason
        if wants_ids:
            shown["token_ids"] = list(piece.token_ids)
        return opening + event(self.with_usage({**self.chunk_base(), "choices": [shown]}))

    def body(self) -> dict[str, Any]:
        answer = {
            **self.base,
            "object": "chat.completion",
            "choices": [self._whole(index) for index in range(len(self.collected))],
            "usage": self.generation.usage(),
        }
        if self.request.prompt_logprobs is not None:
            found = self.prompt_logprobs.get(0, ())
            answer["prompt_logprobs"] = self.writer.prompt(found, self.request.prompt_logprobs)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = list(self.generation.prompts[0].token_ids)
        return answer

    def _open(self, choice: Choice) -> bytes:
        plain = self._choice(choice.index, {"content": TextEvent.SLOT})
        self._plain[choice.index] = TextEvent(self.with_usage({**self.chunk_base(), "choices": [plain]}))
        role = self._choice(choice.index, {"role": "assistant", "content": ""})
        first = self.with_usage({**self.chunk_base(), "choices": [role]})
        if self.request.return_token_ids:
            first["prompt_token_ids"] = list(self.generation.prompts[0].token_ids)
        return event(first)

    def _whole(self, index: int) -> dict[str, Any]:
        found = self.collected[index]
        message = {"role": "assistant", "content": "".join(found.text), "refusal": None}
        whole = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(found.entries),
            "finish_reason": found.finish_reason,
            "stop_reason": found.stop_reason,
        }
        if self.request.return_token_ids:
            whole["token_ids"] = found.token_ids
        return whole

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any] | None:
        return None if self._top is None else self.writer.chat(entries, self._top)

    @staticmethod
    def _choice(index: int, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
