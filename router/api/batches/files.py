"""/v1/files: input and output files of batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

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
from kvferry.router.batch.files import PURPOSES, FileStore, StoredFile, check_purpose, disk_failed
from kvferry.router.request_context import CALL, RequestContext

UPLOADS = 8
"""Largest number of files uploaded at the same time."""
MOST_LISTED = 10_000
"""Largest number of files on one page."""
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


class Uploads:
    """Uploads of files as multipart forms of at most `longest` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._arriving = 0

    async def take(self, request: Request, files: FileStore) -> StoredFile:
        """Receive and store a file.

        Raises InvalidRequest, UnsupportedMedia, RequestTooLarge, Overloaded, DiskFailed, DeadlineExceeded if it does
        not arrive in time, and Cancelled if the client leaves."""
        check_encoding(request)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise InvalidRequest("the request body must be a multipart form with file and purpose")
        if self._arriving >= UPLOADS:
            raise Overloaded(f"{UPLOADS} uploads are already in progress", retry_after=5.0)
        self._arriving += 1
        try:
            form = await self._form(request)
            try:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise InvalidRequest("file must be a file", param="file")
                if not isinstance(purpose, str):
                    raise InvalidRequest("purpose must be given", param="purpose")
                check_purpose(purpose)
                return await asyncio.to_thread(files.add, file.file, file.filename or "file", purpose)
            finally:
                await form.close()
        finally:
            self._arriving -= 1

    async def _form(self, request: Request) -> FormData:
        call: RequestContext = request.scope[CALL]
        try:
            async with asyncio.timeout(call.deadline - time.monotonic()):
                return await self._bounded(request).form(max_files=1, max_fields=16)
        except TimeoutError:
            raise DeadlineExceeded("the upload did not finish before the request's deadline", param="file") from None
        except ClientDisconnect as error:
            raise Cancelled("the client disconnected") from error
        except OSError as error:
            raise disk_failed("the file cannot be stored", error) from error

    def _bounded(self, request: Request) -> Request:
        """Return the request, wrapped to fail as soon as more than the longest body has arrived."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._longest:
            raise self._too_large()
        size = 0

        async def receive() -> Message:
            nonlocal size
            message = await request.receive()
            size += len(message.get("body", b""))
            if size > self._longest:
                raise self._too_large()
            return message

        return Request(request.scope, receive)

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the file is longer than {self._longest} bytes", param="file")


def files_router(batches: Batches, longest: int) -> APIRouter:
    """Return the routes of /v1/files."""
    router, uploads = APIRouter(), Uploads(longest)

    def files_of(request: Request) -> FileStore:
        return batches.files(request.scope[CALL].tenant)

    one: dict[str, Any] = {"responses": errors(404), "openapi_extra": path_parameter("file_id")}

    @router.post(
        "/v1/files", summary="Keep a file", response_model=FileAnswer,
        responses=errors(400, 413, 415, 429, 500, 504, 507), openapi_extra=_TAKES,
    )  # fmt: skip
    async def keep(request: Request) -> dict[str, Any]:
        return (await uploads.take(request, files_of(request))).shown()

    @router.get(
        "/v1/files", summary="List files", response_model=FileList, responses=errors(400),
        openapi_extra=query_parameters(MOST_LISTED, purpose={"enum": list(PURPOSES)}, order={"enum": ["asc", "desc"]}),
    )  # fmt: skip
    async def listed(request: Request) -> dict[str, Any]:
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if purpose is not None and purpose not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        found = await asyncio.to_thread(files_of(request).all)
        kept = [file.shown() for file in found if purpose in (None, file.purpose)]
        return page(kept if order == "desc" else kept[::-1], request, MOST_LISTED)

    @router.get("/v1/files/{file_id}", summary="Retrieve a file's metadata", response_model=FileAnswer, **one)
    async def told(request: Request) -> dict[str, Any]:
        found = await asyncio.to_thread(files_of(request).get, request.path_params["file_id"])
        return found.shown()

    @router.get("/v1/files/{file_id}/content", summary="Retrieve a file's content", response_class=FileResponse, **one)
    async def content(request: Request) -> Response:
        file, size = await asyncio.to_thread(files_of(request).open, request.path_params["file_id"])
        headers = {"content-length": str(size)}
        return StreamingResponse(_pieces(file), media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}", summary="Delete a file", response_model=FileDeleted, **one)
    async def deleted(request: Request) -> dict[str, Any]:
        file_id = request.path_params["file_id"]
        await asyncio.to_thread(files_of(request).delete, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file's pieces and close it; blocks."""
    with file:
        while piece := file.read(2**18):
            yield piece
