"""Mock worker without a model that speaks the OpenAI API, for measuring another router in front of it.

    python -m benchmarks.mock_openai PORT

It answers a completion with one event per token, at once or `seed` microseconds apart, as `mock_nodes` does, and ends
when its standard input does."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from benchmarks.mock_http import Exchange, serve
from benchmarks.mock_nodes import MODEL

_EVENT = {"id": "cmpl-mock", "object": "text_completion", "created": 0, "model": MODEL}
_TOKEN = {**_EVENT, "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def last(tokens: int) -> bytes:
    """Return the last events of a stream of `tokens` tokens."""
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
    return event({**_EVENT, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"


class MockWorker:
    """Streams a completion for any request."""

    def __init__(self) -> None:
        self._token = event(_TOKEN)
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, path: str, body: bytes, exchange: Exchange) -> None:
        """Answer any request."""
        if not path.endswith("/completions"):
            listed = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL}
            exchange.send(json.dumps(listed).encode(), "200 OK")
            return
        request = json.loads(body)
        task = asyncio.create_task(self._stream(request["max_tokens"], (request.get("seed") or 0) / 1e6, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, tokens: int, pace_s: float, exchange: Exchange) -> None:
        exchange.begin()
        for _ in range(tokens):
            exchange.chunk(self._token)
            await exchange.writable.wait()
            await asyncio.sleep(pace_s)
        exchange.chunk(last(tokens))
        exchange.chunk(b"")


if __name__ == "__main__":
    uvloop.run(serve(MockWorker().answer, int(sys.argv[1])))
