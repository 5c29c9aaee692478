"""Embedding calls to llama.cpp and SGLang, whose answers list a vector's numbers as JSON."""

from __future__ import annotations

from array import array
from typing import Any

from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.pooling_engine import PoolingCall, PoolingTask
from kvferry.protocol.errors import InvalidRequest, StepFailed


class LlamaCppPooling:
    """Implements `pooling_engine.PoolingEngine` for a server that was started with --embeddings."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def pool(self, task: PoolingTask, call: PoolingCall) -> array[float]:
        """Return the vector of a prompt, unscaled. Logits are refused: the server ranks texts, not tokens."""
        _require_embed(task)
        reported = await self._http.post("/v1/embeddings", {"input": call.token_ids, "embd_normalize": -1}, None)
        return _numbers(reported, "data", 0, "embedding")


class SglangPooling:
    """Implements `pooling_engine.PoolingEngine` for a server that was started with --is-embedding."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def pool(self, task: PoolingTask, call: PoolingCall) -> array[float]:
        """Return the vector of a prompt, as the server scales it. Logits are refused."""
        _require_embed(task)
        body: dict[str, Any] = {"rid": call.request_id, "input_ids": call.token_ids}
        if call.adapter:
            body["lora_path"] = call.adapter
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        reported = await self._http.post("/encode", body, None)
        return _numbers(reported[0] if isinstance(reported, list) and reported else reported, "embedding")


def _require_embed(task: PoolingTask) -> None:
    if task != "embed":
        raise InvalidRequest("this model's engine returns no classifier logits", param="model")


def _numbers(reported: Any, *path: str | int) -> array[float]:
    try:
        for name in path:
            reported = reported[name]
        return array("f", reported)
    except (TypeError, LookupError, OverflowError) as error:
        raise StepFailed(f"the engine's answer holds no vector: {type(error).__name__}") from error
