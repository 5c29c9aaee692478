"""Routes /v1/files: upload, list, fetch and delete batch input and output files, within a tenant's storage limit."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import Message

from kvferry.protocol.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, RequestTooLarge
from kvferry.router.api.batches.pages import page
from kvferry.router.api.bodies.reader import check_encoding
from kvferry.router.api.documentation import errors, path_parameter, query_parameters
from kvferry.router.batch.batches import Batches
from kvferry.router.batch.files import PURPOSES, StoredFile, check_purpose, disk_failed
from kvferry.router.batch.stores import TenantFiles
from kvferry.router.request_context import CALL, RequestContext

UPLOADS, UPLOADS_PER_TENANT = 64, 8
"""Maximum number of concurrent uploads of all tenants, and of one."""
FRAMING_BYTES = 4096
"""Bytes of an upload besides the file: names and boundaries of the form."""
MAX_LISTED = 10_000
"""Maximum number of files on one page."""
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
}
_TAKES = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}


class FileAnswer(BaseModel):
    """File object."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None
    expires_at: int | None


class FileList(BaseModel):
    """Page of files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """Confirmation that a file was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Reservation:
    """Share of one upload in a tenant's `remaining` bytes; `reserved` sums the uploads by tenant."""

    def __init__(self, reserved: Counter[str], tenant: str, remaining: int) -> None:
        self._reserved, self._tenant, self._remaining, self._size = reserved, tenant, remaining, 0

    def grow(self, size: int) -> None:
        """Reserve `size` bytes in total; raise RequestTooLarge if too few remain."""
        more = max(0, size - self._size)
        if self._reserved[self._tenant] + more > self._remaining + FRAMING_BYTES:
            raise RequestTooLarge(
                f"file: its bytes do not fit into the {self._remaining} that stored files and other uploads leave; "
                "delete files that are not needed",
                param="file",
            )
        self._reserved[self._tenant] += more
        self._size += more

    def release(self) -> None:
        """Release the reserved bytes."""
        self._reserved[self._tenant] -= self._size


class Uploads:
    """Uploads of files as multipart forms of at most `max_bytes` bytes.

    An upload's bytes are reserved before they are read, so that concurrent uploads fit into the tenant's limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._uploading, self._reserved = Counter[str](), Counter[str]()

    async def take(self, request: Request, files: TenantFiles) -> StoredFile:
        """Receive and store a file.

        Raises InvalidRequest, UnsupportedMedia, RequestTooLarge, Overloaded, DiskFailed, RegistryUnavailable,
        DeadlineExceeded if it does not arrive in time, and Cancelled if the client leaves."""
        check_encoding(request)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise InvalidRequest("the request body must be a multipart form with file and purpose")
        tenant = request.scope[CALL].tenant
        for uploading, limit in (self._uploading[tenant], UPLOADS_PER_TENANT), (self._uploading.total(), UPLOADS):
            if uploading >= limit:
                raise Overloaded(f"{limit} uploads are already in progress", retry_after=5.0)
        self._uploading[tenant] += 1
        try:
            return await self._receive(request, files, tenant)
        finally:
            self._uploading[tenant] -= 1

    async def _receive(self, request: Request, files: TenantFiles, tenant: str) -> StoredFile:
        reservation = Reservation(self._reserved, tenant, await files.remaining())
        try:
            form = await self._form(request, reservation)
            try:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise InvalidRequest("file must be a file", param="file")
                if not isinstance(purpose, str):
                    raise InvalidRequest("purpose must be given", param="purpose")
                check_purpose(purpose)
                return await files.add(file.file, file.filename or "file", purpose)
            finally:
                await form.close()
        finally:
            reservation.release()

    async def _form(self, request: Request, reservation: Reservation) -> FormData:
        call: RequestContext = request.scope[CALL]
        try:
            async with asyncio.timeout(call.deadline - time.monotonic()):
                return await self._with_limit(request, reservation).form(max_files=1, max_fields=16)
        except TimeoutError:
            raise DeadlineExceeded("the upload did not finish before the request's deadline", param="file") from None
        except ClientDisconnect as error:
            raise Cancelled("the client disconnected") from error
        except OSError as error:
            raise disk_failed("the file cannot be stored", error) from error

    def _with_limit(self, request: Request, reservation: Reservation) -> Request:
        """Return the request, wrapped to fail once it exceeds `max_bytes` or the tenant's remaining bytes."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            if int(declared) > self._max_bytes:
                raise self._too_large()
            reservation.grow(int(declared))
        size = 0

        async def receive() -> Message:
            nonlocal size
            message = await request.receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise self._too_large()
            reservation.grow(size)
            return message

        return Request(request.scope, receive)

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the file is longer than {self._max_bytes} bytes", param="file")


def files_router(batches: Batches, max_bytes: int) -> APIRouter:
    """Return the routes of /v1/files."""
    router, uploads = APIRouter(), Uploads(max_bytes)

    def files_of(request: Request) -> TenantFiles:
        return batches.files(request.scope[CALL].tenant)

    one: dict[str, Any] = {"responses": errors(404, 503), "openapi_extra": path_parameter("file_id")}

    @router.post(
        "/v1/files", summary="Upload a file", response_model=FileAnswer,
        responses=errors(400, 413, 415, 429, 500, 503, 504, 507), openapi_extra=_TAKES,
    )  # fmt: skip
    async def upload(request: Request) -> dict[str, Any]:
        return (await uploads.take(request, files_of(request))).shown()

    @router.get(
        "/v1/files", summary="List files", response_model=FileList, responses=errors(400, 503),
        openapi_extra=query_parameters(MAX_LISTED, purpose={"enum": list(PURPOSES)}, order={"enum": ["asc", "desc"]}),
    )  # fmt: skip
    async def list_page(request: Request) -> dict[str, Any]:
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if purpose is not None and purpose not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        found = await files_of(request).all()
        found_files = [file.shown() for file in found if purpose in (None, file.purpose)]
        return page(found_files if order == "desc" else found_files[::-1], request, MAX_LISTED)

    @router.get("/v1/files/{file_id}", summary="Retrieve a file's metadata", response_model=FileAnswer, **one)
    async def retrieve(request: Request) -> dict[str, Any]:
        return (await files_of(request).get(request.path_params["file_id"])).shown()

    @router.get("/v1/files/{file_id}/content", summary="Retrieve a file's content", response_class=FileResponse, **one)
    async def content(request: Request) -> Response:
        pieces, size = await files_of(request).open(request.path_params["file_id"])
        headers = {"content-length": str(size)}
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}", summary="Delete a file", response_model=FileDeleted, **one)
    async def delete(request: Request) -> dict[str, Any]:
        file_id = request.path_params["file_id"]
        await files_of(request).delete(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router
