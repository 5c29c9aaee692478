"""What vLLM's /pooling does, with a toy in the place of the model."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tests.engine_adapter.mock_behaviour import Behaviour

WIDTH = 8


def toy_vector(tokens: Sequence[int], count: int = WIDTH) -> list[float]:
    """Numbers between -4 and 4 that depend on all tokens."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).digest()
    return [digest[at] / 32 - 4 for at in range(count)]


def mount_pooling(app: FastAPI, behaviour: Behaviour, asked: list[dict[str, Any]]) -> None:
    """Add the endpoint. pooling_fault: nan (one number is not finite), short (no vector), refuse (503)."""

    @app.post("/pooling")
    async def pooling(request: Request) -> Response:
        body = await request.json()
        if not behaviour.pools:
            return JSONResponse({"error": {"message": "The model does not support Pooling API", "code": 501}}, 501)
        asked.append(body)
        if body["task"] != behaviour.pools:
            message = f"Unsupported task: {body['task']!r} Supported tasks: ({behaviour.pools!r},)"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        assert body["use_activation"] is False
        assert (body["encoding_format"], body["embed_dtype"], body["endianness"]) == ("base64", "float32", "little")
        if behaviour.pooling_fault == "refuse":
            return JSONResponse({"error": {"message": "overloaded", "code": 503}}, 503)
        found = toy_vector(body["input"], WIDTH if behaviour.pools == "embed" else 1)
        if behaviour.pooling_fault == "nan":
            found[0] = float("nan")
        packed = b"" if behaviour.pooling_fault == "short" else struct.pack(f"<{len(found)}f", *found)
        return JSONResponse({"data": [{"index": 0, "data": base64.b64encode(packed).decode()}]})
