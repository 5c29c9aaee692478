"""ResponseAnswer: answer of /v1/responses, as a response object or as the events that build it."""

from __future__ import annotations

import time
from typing import Any

from kvferry.protocol.errors import KvferryError
from kvferry.router.api.answer_base import Answer
from kvferry.router.api.formats.logprobs import LogprobWriter
from kvferry.router.api.formats.parts import CALL, REASONING, TEXT, Part, Parts, Step
from kvferry.router.api.generation import Generation
from kvferry.router.api.responses.request import ResponsesChat, ResponsesRequest
from kvferry.router.api.responses.tools import client_tools, input_of
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import TextEvent, named_event
from kvferry.router.request_context import RequestContext
from kvferry.router.text.transcript import Entry, Piece

_ID = {TEXT: "msg", REASONING: "rs", CALL: "fc"}
_DELTA = {
    TEXT: "response.output_text",
    REASONING: "response.reasoning_text",
    CALL: "response.function_call_arguments",
}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reasons that leave a response incomplete."""


class ResponseAnswer(Answer):
    """Response object of one request; it repeats the request's settings. Implements `router.api.answer_base.Answer`."""

    def __init__(self, call: RequestContext, pool: ServedModel, chat: ResponsesChat, generation: Generation) -> None:
        super().__init__(generation, streams=bool(chat.stream))
        request: ResponsesRequest = chat.original
        self._request = request
        self._model = pool.name
        self._parts = Parts()
        self._tools = {tool.called: tool for tool in client_tools(request.body.tools)}
        self._top = request.body.top_logprobs or 0
        self._writer = LogprobWriter(pool.text.tokenizer) if request.body.shows_logprobs else None
        self._number, self._after = 0, -1
        self._plain: tuple[Part, TextEvent] | None = None

    @property
    def id(self) -> str:
        """Return the response's id."""
        return self._request.id

    def begin_after(self, number: int) -> None:
        self._after = number

    def begun(self) -> dict[str, Any]:
        """Return the response before it has any output."""
        return self._request.response(self._model, "in_progress", self._drawing())

    def opening(self) -> bytes:
        response = self.begun()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, choice: Choice, piece: Piece) -> bytes:
        if self._parts.is_text(piece):
            return self._text(self._parts.grow(piece.text), piece.text) if piece.text else b""
        return b"".join(self._stepped(step) for step in self._parts.add(piece))

    def closing(self) -> bytes:
        response = self.body()
        return self._event(f"response.{response['status']}", response=response)

    def failing(self, error: KvferryError) -> bytes:
        """Return the error, and the response so far."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **fields) + self._event("response.failed", response=self.failed(error))

    def failed(self, error: KvferryError) -> dict[str, Any]:
        """Return the failed response, with the items completed before the error."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return {**self.body("failed"), "error": {"code": code, "message": error.message}}

    def take(self, choice: Choice, piece: Piece) -> None:
        for _ in self._parts.add(piece):
            pass

    async def settle(self) -> None:
        await self.flush()
        await self.keep(self.body())

    async def keep(self, response: dict[str, Any]) -> None:
        """Store the response's final state if it is to be stored; never raise."""
        await self._request.keep(response)

    def body(self, status: str = "") -> dict[str, Any]:
        """Return the response so far; its status follows from the finish reason unless given."""
        reason = _INCOMPLETE.get(self._parts.finish_reason or "")
        status = status or ("incomplete" if reason else "completed")
        last = len(self._parts.all) - 1
        return {
            **self._request.response(self._model, status, self._drawing()),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [
                self._item(part, "incomplete" if part.index == last and status != "completed" else "completed")
                for part in self._parts.all
            ],
            "usage": _usage(self.generation.usage(), self.generation.used().written),
        }

    def _drawing(self) -> dict[str, float]:
        """Return the sampling parameters in effect, including the model's defaults."""
        params = self.generation.prompts[0].params
        return {"temperature": params.temperature, "top_p": params.top_p}

    def _stepped(self, step: Step) -> bytes:
        what, part, text, entries = step
        match what:
            case "open":
                return self._opened(part)
            case "grow" if self._custom(part):
                return b""
            case "grow":
                place = {} if part.kind == CALL else {"content_index": 0}
                shown = {"logprobs": self._logprobs(entries)} if part.kind == TEXT else {}
                return self._event(f"{_DELTA[part.kind]}.delta", **self._at(part), **place, delta=text, **shown)
            case _:
                return self._ended(part)

    def _opened(self, part: Part) -> bytes:
        item = self._item(part, "in_progress")
        if part.kind != CALL:
            item["content"] = []
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind == CALL:
            return added
        return added + self._event(
            "response.content_part.added", **self._at(part), content_index=0, part=self._content(part)
        )

    def _ended(self, part: Part) -> bytes:
        at, done = self._at(part), f"{_DELTA[part.kind]}.done"
        if self._custom(part):
            text, kind = input_of(part.text), "response.custom_tool_call_input"
            events = self._event(f"{kind}.delta", **at, delta=text) + self._event(f"{kind}.done", **at, input=text)
        elif part.kind == CALL:
            events = self._event(done, **at, name=self._called(part)["name"], arguments=part.text)
        else:
            shown = {"logprobs": self._logprobs(part.entries)} if part.kind == TEXT else {}
            events = self._event(done, **at, content_index=0, text=part.text, **shown)
            events += self._event("response.content_part.done", **at, content_index=0, part=self._content(part))
        status = "incomplete" if self._parts.finish_reason in _INCOMPLETE else "completed"
        return events + self._event("response.output_item.done", output_index=part.index, item=self._item(part, status))

    def _text(self, part: Part, text: str) -> bytes:
        """Return a delta of plain text, filled into a template, with its sequence number at the end."""
        if self._plain is None or self._plain[0] is not part:
            name = "response.output_text.delta"
            delta = {"type": name, **self._at(part), "content_index": 0, "logprobs": [], "delta": TextEvent.SLOT}
            self._plain = part, TextEvent(delta, under=name)
        self._number += 1
        if self._number - 1 <= self._after:
            return b""
        filled = self._plain[1].fill(text)
        return filled[: -len(b"}\n\n")] + b',"sequence_number":%d}\n\n' % (self._number - 1)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        if self._number - 1 <= self._after:
            return b""
        return named_event({"type": kind, **fields, "sequence_number": self._number - 1})

    def _at(self, part: Part) -> dict[str, Any]:
        return {"item_id": self._id(part), "output_index": part.index}

    def _id(self, part: Part) -> str:
        kind = "ctc" if self._custom(part) else _ID[part.kind]
        return f"{kind}_{self._request.name}_{part.index}"

    def _custom(self, part: Part) -> bool:
        """Return whether the part calls a custom tool; its input is written when the call has ended."""
        tool = self._tools.get(part.name) if part.kind == CALL else None
        return tool is not None and tool.is_custom

    def _called(self, part: Part) -> dict[str, str]:
        """Return the called tool's name, and its namespace if it has one."""
        tool = self._tools.get(part.name)
        if tool is None:
            return {"name": part.name}
        return {"name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        own = {"id": self._id(part), "status": status}
        match part.kind:
            case "text":
                return {**own, "type": "message", "role": "assistant", "content": [self._content(part)]}
            case "reasoning":
                return {**own, "type": "reasoning", "summary": [], "content": [self._content(part)]}
        called = {"call_id": part.call_id, **self._called(part)}
        if self._custom(part):
            shown = "" if status == "in_progress" else input_of(part.text)
            return {**own, "type": "custom_tool_call", **called, "input": shown}
        return {**own, "type": "function_call", **called, "arguments": part.text}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind == REASONING:
            return {"type": "reasoning_text", "text": part.text}
        return {
            "type": "output_text",
            "text": part.text,
            "annotations": [],
            "logprobs": self._logprobs(part.entries),
        }

    def _logprobs(self, entries: list[Entry]) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = self._writer.chat(entries, self._top)["content"] if self._writer else []
        return shown


def _usage(chat: dict[str, Any], written: int) -> dict[str, Any]:
    """Return the chat's usage in this API's format. written: prompt tokens that were computed and may be reused."""
    reasoning = chat.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {**chat["prompt_tokens_details"], "cache_write_tokens": written},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }
