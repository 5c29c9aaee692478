"""Routes /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's format, which change the nodes' LoRA adapters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from kvferry.protocol.adapters import ChangeAdapter
from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.router.api.bodies.fields import MAX_NAME
from kvferry.router.api.bodies.reader import BodyReader, parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.documentation import Responses, errors, takes
from kvferry.router.api.served_models import ServedModels

MAX_PATH = 4096
"""Longest path of an adapter, in characters."""

ADAPTER_ERRORS: Responses = errors(400, 403, 404, 413, 415, 429, 500, 503)
"""Documented errors of both routes."""


class Forbidden(InvalidRequest):
    """Adapter loading is disabled on this router."""

    status, code = 403, "forbidden"


class Changed(BaseModel):
    """Answer after an adapter was loaded or unloaded."""

    message: str


class UnloadAdapterBody(RequestBody):
    """Body of POST /v1/unload_lora_adapter; without `model`, the model that has the adapter is meant."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class LoadAdapterBody(UnloadAdapterBody):
    """Body of POST /v1/load_lora_adapter.

    `lora_path` is a directory in PEFT's layout on the machines of the nodes. Without `model`, the first model is meant.
    """

    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]


ADAPTER_BODIES = (LoadAdapterBody, UnloadAdapterBody)


def adapter_routes(pools: ServedModels, reader: BodyReader, allowed: bool) -> APIRouter:
    """Return the routes; they answer 403 unless `allowed`, since a client names a path that the nodes read."""
    router = APIRouter(responses=ADAPTER_ERRORS)

    def check() -> None:
        if not allowed:
            raise Forbidden("loading adapters at run time is off; start the router with --allow-lora-updates")

    @router.post(
        "/v1/load_lora_adapter",
        summary="Load a LoRA adapter on the nodes of a model",
        openapi_extra=takes(LoadAdapterBody),
    )
    async def load(request: Request) -> Changed:
        check()
        body = await parsed(LoadAdapterBody, await reader.read(request))
        if pools.serves(body.lora_name):
            raise InvalidRequest(f"{body.lora_name!r} is the name of a model", param="lora_name")
        await pools.pool(body.model).cluster.adapters.change(ChangeAdapter(body.lora_name, body.lora_path))
        return Changed(message=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        summary="Unload a LoRA adapter from the nodes of a model",
        openapi_extra=takes(UnloadAdapterBody),
    )
    async def unload(request: Request) -> Changed:
        check()
        body = await parsed(UnloadAdapterBody, await reader.read(request))
        holders = (pool for pool in pools if body.lora_name in pool.cluster.adapters.ids)
        pool = pools.pool(body.model) if body.model else next(holders, pools.first)
        if body.lora_name not in pool.cluster.adapters.ids:
            raise ModelNotFound(f"{pool.text.name!r} has no adapter {body.lora_name!r}", param="lora_name")
        await pool.cluster.adapters.change(ChangeAdapter(body.lora_name))
        return Changed(message=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
