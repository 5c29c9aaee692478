"""Routes GET /v1/models and /version: served models with adapters and modalities, and the router's version."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from kvferry.protocol.media import MODALITIES, TRANSCRIPTION
from kvferry.protocol.version import VERSION
from kvferry.router.api.answers import Model, ModelList, Version
from kvferry.router.api.documentation import errors, path_parameter
from kvferry.router.api.served_models import ServedModel, ServedModels


def about(pools: ServedModels) -> APIRouter:
    """Return the routes of /v1/models and /version."""
    router, created = APIRouter(), int(time.time())

    def model(pool: ServedModel, name: str) -> Model:
        return Model(
            id=name,
            object="model",
            created=created,
            owned_by="kvferry",
            root=pool.adapter[1] or pool.text.called.own,
            parent=pool.text.name if pool.adapter[0] else None,
            max_model_len=pool.max_model_len,
            input_modalities=modalities(pool),
            transcription=pool.media is not None and TRANSCRIPTION in pool.cluster.media.modalities(pool.adapter[1]),
        )

    @router.get("/v1/models", summary="List the served models under all of their names")
    async def models() -> ModelList:
        return ModelList(object="list", data=[model(pools.pool(name), name) for name in pools.names()])

    @router.get(
        "/v1/models/{id:path}", summary="Retrieve a model", responses=errors(404), openapi_extra=path_parameter("id")
    )
    async def model_by_id(request: Request) -> Model:
        name = request.path_params["id"]
        return model(pools.pool(name), name)

    @router.get("/version", summary="Get the version")
    async def version() -> Version:
        return Version(version=VERSION)

    return router


def modalities(pool: ServedModel) -> list[str]:
    """Return what a model's prompts may hold: text, and the media that some node takes."""
    taken = pool.cluster.media.modalities(pool.adapter[1]) if pool.media is not None else ()
    return ["text", *(each for each in MODALITIES if each in taken)]
