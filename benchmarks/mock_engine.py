"""Mock server without a model that speaks vLLM's token interface, for measuring an adapter in front of it.

    python -m benchmarks.mock_engine PORT

It answers with one event per token, at once or `seed` microseconds apart, as `mock_nodes` does, and ends when its
standard input does."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from benchmarks.mock_http import Exchange, serve
from benchmarks.mock_nodes import MAX_MODEL_LEN, MODEL, STRIDE, WORDS
from benchmarks.mock_openai import event

BLOCK_SIZE, BLOCKS = 16, 1 << 20
STATUS: dict[str, Any] = {
    "/health": {},
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": MODEL, "root": MODEL, "parent": None, "max_model_len": MAX_MODEL_LEN}]},
    "/kv_event_sources": {},
}


class MockEngine:
    """Streams tokens for any request."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._began = time.time()

    def answer(self, path: str, body: bytes, exchange: Exchange) -> None:
        """Answer any request."""
        if path in STATUS:
            exchange.send(json.dumps(STATUS[path]).encode(), "200 OK")
        elif path == "/metrics":
            exchange.send(self._metrics(), "200 OK")
        elif path != "/inference/v1/generate":
            exchange.send(b"{}", "404 Not Found")
        else:
            request = json.loads(body)
            task = asyncio.create_task(self._stream(request["sampling_params"], len(request["token_ids"]), exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stream(self, params: dict[str, Any], prompt: int, exchange: Exchange) -> None:
        count, pace_s = params["max_tokens"], (params.get("seed") or 0) / 1e6
        self._running += 1
        try:
            exchange.begin()
            for number in range(count):
                reason = "length" if number + 1 == count else None
                token = WORDS[number * STRIDE % len(WORDS)]
                exchange.chunk(event({"choices": [{"index": 0, "token_ids": [token], "finish_reason": reason}]}))
                await exchange.writable.wait()
                await asyncio.sleep(pace_s)
            usage = {"prompt_tokens": prompt, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
            exchange.chunk(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            exchange.chunk(b"")
        finally:
            self._running -= 1

    def _metrics(self) -> bytes:
        lines = (
            f"process_start_time_seconds {self._began}",
            f"vllm:num_requests_running {self._running}",
            "vllm:num_requests_waiting 0",
            "vllm:kv_cache_usage_perc 0",
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",cache_dtype="auto",num_gpu_blocks="{BLOCKS}"}} 1',
        )
        return "\n".join(lines).encode() + b"\n"


if __name__ == "__main__":
    uvloop.run(serve(MockEngine().answer, int(sys.argv[1])))
