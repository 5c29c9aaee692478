"""Answers of the API of token ids in vLLM's JSON, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from kvferry.decode_worker.scale_out.bodies import GenerateBody, StreamOptions
from kvferry.decode_worker.scale_out.open_requests import OpenRequest
from kvferry.protocol.messages import TokenDelta, TokenLogprobs

DONE = b"data: [DONE]\n\n"


class Answer:
    """Answer of one request, whole or as a stream.

    model: name of the model in the answer."""

    def __init__(self, body: GenerateBody, opened: OpenRequest, model: str) -> None:
        self._body, self._opened, self._model = body, opened, model
        self._scores = body.sampling_params.logprobs is not None
        self._completion = 0
        self._cached: int | None = None

    async def whole(self) -> bytes:
        """Return the whole answer as JSON. Raises the error with which the request ended."""
        deltas: list[TokenDelta] = []
        created = int(time.time())
        while more := await self._opened.next():
            deltas += more
            if self._opened.ended:
                break
        if self._opened.error is not None:
            raise self._opened.error
        self._count(deltas)
        answer: dict[str, Any] = {
            "request_id": self._opened.shown,
            "model": self._model,
            "created": created,
            "usage": self._usage(),
            "output_mode": "tokens",
            "kv_transfer_params": None,
            "prompt_logprobs": _prompt_logprobs(deltas),
            "choices": [self._choice(deltas)],
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._body.token_ids
        return to_json(answer)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer's server-sent events; the last chunk of a failed request is an error."""
        options = self._body.stream_options or StreamOptions()
        extra = {"prompt_token_ids": self._body.token_ids} if self._body.return_token_ids else {}
        while deltas := await self._opened.next():
            self._count(deltas)
            usage = self._usage() if options.continuous_usage_stats else None
            yield self._event([self._choice(deltas)], usage, extra)
            extra = {}
            if deltas[-1].finish_reason is not None:
                break
        if self._opened.error is not None:
            yield _event(self._opened.error.body())
        else:
            if self._opened.aborted:
                yield self._event([self._choice([])], None, extra)
            if options.include_usage:
                yield self._event([], self._usage(), {})
        yield DONE

    def _event(self, choices: list[Any], usage: dict[str, Any] | None, extra: dict[str, Any]) -> bytes:
        chunk = {"request_id": self._opened.shown, "usage": usage, "output_mode": "tokens", "choices": choices}
        return _event({**chunk, **extra})

    def _count(self, deltas: Sequence[TokenDelta]) -> None:
        self._completion += sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas[:1]:
            if delta.reuse is not None:
                self._cached = delta.reuse.cached_len

    def _usage(self) -> dict[str, Any]:
        prompt = len(self._body.token_ids)
        details = None if self._cached is None else {"cached_tokens": self._cached}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": details,
        }

    def _choice(self, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        """Return the answer's only choice, with these outputs."""
        reason, stop = (deltas[-1].finish_reason, deltas[-1].stop_token) if deltas else (None, None)
        if reason is None and self._opened.aborted and not (self._body.stream and deltas):
            reason = "abort"
        scores = [_scored(each, self._top) for delta in deltas for each in delta.logprobs or ()]
        return {
            "index": 0,
            "finish_reason": "stop" if reason == "closed" else reason,
            "stop_reason": stop if stop in (self._body.sampling_params.stop_token_ids or ()) else None,
            "token_ids": [token for delta in deltas for token in delta.token_ids],
            "logprobs": {"content": scores} if self._scores else None,
        }

    @property
    def _top(self) -> int:
        return max(1, self._body.sampling_params.logprobs or 0)


def _scored(scores: TokenLogprobs, most: int) -> dict[str, Any]:
    """Return one position: its token, and a list of that and the likeliest other tokens, `most` in total."""
    own = {"token_id": scores.token_id, "logprob": scores.logprob, "rank": scores.rank}
    return {**own, "top_logprobs": [own, *_others(scores)][:most]}


def _others(scores: TokenLogprobs) -> Iterable[dict[str, Any]]:
    for rank, (token, logprob) in enumerate(scores.top, 1):
        if token != scores.token_id:
            yield {"token_id": token, "logprob": logprob, "rank": rank}


def _prompt_logprobs(deltas: Sequence[TokenDelta]) -> list[Any] | None:
    """Return scores by token id for each prompt token; the first has none."""
    scored = deltas[0].prompt_logprobs if deltas else None
    if scored is None:
        return None
    return [
        None
        if each is None
        else {
            str(one["token_id"]): {"logprob": one["logprob"], "rank": one["rank"], "decoded_token": None}
            for one in _scored(each, len(each.top) + 1)["top_logprobs"]
        }
        for each in scored
    ]


def _event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
