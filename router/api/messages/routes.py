"""Route POST /v1/messages/count_tokens, which counts the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request

from kvferry.router.api.bodies.reader import BodyReader, parsed
from kvferry.router.api.documentation import errors, takes
from kvferry.router.api.messages.answers import MessageErrorAnswer, MessageTokens
from kvferry.router.api.messages.body import CountBody
from kvferry.router.api.messages.chat import chat
from kvferry.router.api.messages.errors import PATH
from kvferry.router.api.served_models import ServedModels
from kvferry.router.request_context import CALL, RequestContext
from kvferry.router.text.encoding import Bound
from kvferry.runtime.disconnect import until_disconnect


def counting(pools: ServedModels, reader: BodyReader, statuses: Sequence[int]) -> APIRouter:
    """Return the route; `statuses` are those of its errors."""
    router = APIRouter(responses=errors(*statuses, model=MessageErrorAnswer))

    @router.post(
        f"{PATH}/count_tokens",
        summary="Count the tokens of messages",
        response_model=MessageTokens,
        openapi_extra=takes(CountBody),
    )
    async def counted(request: Request) -> dict[str, int]:
        data, call = await reader.read(request), request.scope[CALL]
        return await until_disconnect(request.receive, count_tokens(pools, data, call))

    return router


async def count_tokens(pools: ServedModels, data: bytes, call: RequestContext) -> dict[str, int]:
    """Count the tokens of the prompt that these messages form; raise InvalidRequest.

    A prompt with images is made by an engine, which then counts their tokens."""
    body = await parsed(CountBody, data)
    pool = pools.pool(body.model)
    translated = chat(body)
    if (seen := translated.media_chat(pool.text)) is not None:
        return {"input_tokens": len((await pool.media_prompt(call, translated, seen)).token_ids)}
    (prompt,) = await pool.prompts(translated, call.tenant)
    assert isinstance(prompt, str)
    bound = Bound(pool.max_model_len, "messages", truncated=True)
    (ids,) = await pool.encoder.encode([prompt], bound, add_special_tokens=translated.marks_texts())
    return {"input_tokens": len(ids)}
