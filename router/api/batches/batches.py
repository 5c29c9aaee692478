"""Routes /v1/batches: create, list, retrieve and cancel batches of requests from an uploaded file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from kvferry.router.api.batches.pages import page
from kvferry.router.api.bodies.reader import BodyReader, parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.documentation import errors, path_parameter, query_parameters, takes
from kvferry.router.batch.batches import Batches
from kvferry.router.request_context import CALL

MAX_LISTED = 100
"""Maximum number of batches on one page."""
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
"""Status values of a batch."""
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchBody(RequestBody):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Annotated[str, Field(max_length=256)]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


class BatchErrors(BaseModel):
    """Lines of the input that are not valid requests."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class Counts(BaseModel):
    """Request counts of a batch."""

    total: int
    completed: int
    failed: int


class BatchAnswer(BaseModel):
    """Batch object."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """Page of batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batches_router(batches: Batches, reader: BodyReader) -> APIRouter:
    """Return the routes of /v1/batches."""
    router = APIRouter()
    one: dict[str, Any] = {"openapi_extra": path_parameter("batch_id"), "response_model": BatchAnswer}

    @router.post(
        "/v1/batches", summary="Create a batch", response_model=BatchAnswer,
        responses=errors(400, 404, 413, 415, 429, 500, 503, 507), openapi_extra=takes(BatchBody),
    )  # fmt: skip
    async def create(request: Request) -> dict[str, Any]:
        body = await parsed(BatchBody, await reader.read(request))
        tenant = request.scope[CALL].tenant
        return (await batches.create(tenant, body.endpoint, body.input_file_id, body.metadata)).shown()

    @router.get(
        "/v1/batches", summary="List batches, newest first", response_model=BatchList, responses=errors(400, 503),
        openapi_extra=query_parameters(MAX_LISTED),
    )  # fmt: skip
    async def list_page(request: Request) -> dict[str, Any]:
        tenant = request.scope[CALL].tenant
        found = await batches.of(tenant).all()
        return page([batch.shown() for batch in found], request, MAX_LISTED)

    @router.get("/v1/batches/{batch_id}", summary="Retrieve a batch", responses=errors(404, 503), **one)
    async def retrieve(request: Request) -> dict[str, Any]:
        return (await batches.of(request.scope[CALL].tenant).get(request.path_params["batch_id"])).shown()

    @router.post(
        "/v1/batches/{batch_id}/cancel", summary="Cancel a batch", responses=errors(400, 404, 500, 503, 507), **one
    )
    async def cancel(request: Request) -> dict[str, Any]:
        return (await batches.cancel(request.scope[CALL].tenant, request.path_params["batch_id"])).shown()

    return router
