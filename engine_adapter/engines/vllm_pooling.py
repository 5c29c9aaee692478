"""The part of vLLM's client that makes vectors and logits, as of vLLM 0.32 (`POST /pooling`)."""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import Callable
from typing import Any

from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.pooling_engine import PoolingCall, PoolingTask
from kvferry.protocol.errors import StepFailed


class VllmPooling:
    """Implements `pooling_engine.PoolingEngine`. model: returns the name of the served model."""

    def __init__(self, http: EngineHttp, model: Callable[[], str]) -> None:
        self._http, self._model = http, model

    async def pool(self, task: PoolingTask, call: PoolingCall) -> array[float]:
        """Return the numbers of a prompt as the model's head gives them, without scaling or activation."""
        body: dict[str, Any] = {
            "request_id": call.request_id, "model": call.adapter or self._model(), "task": task,
            "input": call.token_ids, "use_activation": False, "encoding_format": "base64", "embed_dtype": "float32",
            "endianness": "little",
        }  # fmt: skip
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        told = await self._http.post("/pooling", body, None)
        try:
            return _numbers(base64.b64decode(told["data"][0]["data"], validate=True))
        except (TypeError, LookupError, ValueError, binascii.Error) as error:
            raise StepFailed(f"the engine's answer holds no vector: {type(error).__name__}") from error


def _numbers(data: bytes) -> array[float]:
    """Return float32 numbers that are written in little-endian order."""
    found = array("f")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found
