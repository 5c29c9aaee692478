"""Routes POST /tokenize and /detokenize, and GET /tokenizer_info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from kvferry.router.api.answers import Text, TokenizerInfo, Tokens
from kvferry.router.api.bodies.reader import BodyReader
from kvferry.router.api.documentation import errors, takes
from kvferry.router.api.served_models import ServedModels
from kvferry.router.api.tokenization import DetokenizeBody, TokenizeBody, describe, detokenize, tokenize
from kvferry.router.request_context import CALL
from kvferry.runtime.disconnect import until_disconnect


def tokenization_routes(pools: ServedModels, reader: BodyReader, statuses: Sequence[int]) -> APIRouter:
    """Return the tokenization routes; `statuses` are those of their errors."""
    router = APIRouter(responses=errors(*statuses))

    @router.post(
        "/tokenize", summary="Tokenize text or messages", response_model=Tokens, openapi_extra=takes(TokenizeBody)
    )
    async def tokenized(request: Request) -> dict[str, Any]:
        call = request.scope[CALL]
        return await until_disconnect(request.receive, tokenize(pools, await reader.read(request), call))

    @router.post(
        "/detokenize", summary="Detokenize token ids", response_model=Text, openapi_extra=takes(DetokenizeBody)
    )
    async def detokenized(request: Request) -> dict[str, Any]:
        return await until_disconnect(request.receive, detokenize(pools, await reader.read(request)))

    @router.get("/tokenizer_info", summary="Get the tokenizer's special tokens and chat template")
    async def tokenizer_info() -> TokenizerInfo:
        return TokenizerInfo(**describe(pools))

    return router
