"""Route of an adapter that makes the prompts of chats with media."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response

from kvferry.engine_adapter.media_engine import MediaEngine
from kvferry.protocol.errors import AdapterNotLoaded, DeadlineExceeded, InvalidRequest
from kvferry.protocol.media import RenderRequest
from kvferry.protocol.wire import pack
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.http import read_message


def mount_render(app: FastAPI, media: MediaEngine | None, adapters: Callable[[], Mapping[str, str]]) -> None:
    """Add `POST /attempts/render`. adapters: returns names of LoRA adapters by their ids."""

    async def post_render(request: Request) -> Response:
        """Answer with the RenderedPrompt of a RenderRequest; a caller that leaves ends the engine's work."""
        asked = await read_message(request, RenderRequest)
        names = adapters()
        if media is None:
            raise InvalidRequest("this model's engine takes no images, audio or video", param="messages")
        if asked.adapter and asked.adapter not in names:
            raise AdapterNotLoaded("the engine has no LoRA adapter of this id")
        try:
            async with asyncio.timeout(max(0.0, asked.deadline_s)):
                made = media.render(asked.chat, names.get(asked.adapter, ""))
                return Response(pack(await until_disconnect(request.receive, made)), media_type="application/msgpack")
        except TimeoutError:
            raise DeadlineExceeded(f"no prompt after {asked.deadline_s:.3g} s") from None

    app.post("/attempts/render")(post_render)
