"""What vLLM's render endpoint does, with toys in the place of template, tokenizer and image processor."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import UploadFile

from tests.engine_adapter.model_cache import Media

PLACEHOLDER, PART_TOKENS = 777, 24
"""Token that stands for media, and how many of it an image has."""


def render(body: dict[str, Any], modalities: tuple[str, ...]) -> Response:
    """The prompt of a chat: a token a character, and placeholders for media; refuses what the toy does not take."""
    tokens: list[int] = []
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[dict[str, int]]] = {}
    datas: dict[str, list[str]] = {}
    for message in body["messages"]:
        tokens += characters(f"<{message['role']}>")
        content = message.get("content") or ""
        parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "text":
                tokens += characters(part["text"])
                continue
            modality = part["type"].removesuffix("_url")
            url = part[part["type"]]["url"]
            if modality not in modalities or not url.startswith("data:"):
                return JSONResponse({"error": {"message": f"no {part['type']}", "code": 400}}, 400)
            data = base64.b64decode(url.partition(",")[2].split(",")[0])
            hashes.setdefault(modality, []).append(hashlib.sha256(data).hexdigest())
            ranges.setdefault(modality, []).append({"offset": len(tokens), "length": PART_TOKENS})
            datas.setdefault(modality, []).append(base64.b64encode(b"tensors of " + data).decode())
            tokens += [PLACEHOLDER] * PART_TOKENS
    tokens += characters("<assistant>" if body.get("add_generation_prompt", True) else "")
    features = {"mm_hashes": hashes, "mm_placeholders": ranges, "kwargs_data": datas, "mm_metadata": None}
    return JSONResponse({"request_id": "chatcmpl-1", "token_ids": tokens, "features": features if hashes else None})


def characters(text: str) -> list[int]:
    return [1000 + ord(each) % 1000 for each in text]


def media_of(features: dict[str, Any] | None) -> list[Media]:
    """Hash, offset and length of each part, in order."""
    if not features:
        return []
    found = [
        (name, place["offset"], place["length"])
        for modality, names in features["mm_hashes"].items()
        for name, place in zip(names, features["mm_placeholders"][modality], strict=True)
    ]
    return sorted(found, key=lambda each: each[1])


def seen_in(features: dict[str, Any] | None) -> list[object]:
    """What the toy model sees: the media's places, and their tensors."""
    return [*media_of(features), *features["kwargs_data"].items()] if features else []


def mount_speech(app: FastAPI) -> None:
    """Endpoints of audio: what is heard is the size of the file and the form's fields."""

    async def heard(request: Request) -> Response:
        form = await request.form()
        file = form["file"]
        assert isinstance(file, UploadFile)
        data = await file.read()
        fields = {name: form.getlist(name) for name in form if name != "file"}
        if fields.get("prompt") == ["fail"]:
            return JSONResponse({"error": {"message": "cannot hear", "code": 400}}, 400)
        text = f"{request.url.path} {file.filename} {len(data)}"
        if fields.get("stream") == ["true"]:
            return StreamingResponse(spoken(text.split(), fields), media_type="text/event-stream")
        if fields["response_format"] == ["text"]:
            return Response(text, media_type="text/plain")
        return JSONResponse({"text": text, "fields": fields})

    async def spoken(words: list[str], fields: dict[str, Any]) -> AsyncIterator[str]:
        for word in words:
            yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
            await asyncio.sleep(0.01)
            if fields.get("prompt") == ["break"]:
                raise RuntimeError("the engine ends")
        yield "data: [DONE]\n\n"

    app.post("/v1/audio/transcriptions")(heard)
    app.post("/v1/audio/translations")(heard)
