"""OpenAPI description of the API: FastAPI subclass and helpers for errors, headers, and bodies that routes parse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.types import Receive, Scope, Send

from kvferry.protocol.version import VERSION
from kvferry.router.api.answers import ErrorAnswer
from kvferry.runtime.rejection import RETRY_AFTER_S

Responses = dict[int | str, dict[str, Any]]
"""FastAPI's `responses` argument, by status."""

_REFERENCE = "#/components/schemas/{model}"
_ID = {"x-request-id": {"description": "the request's id", "schema": {"type": "string"}}}
_RETRY = {"retry-after": {"description": "seconds after which to retry", "schema": {"type": "integer", "minimum": 1}}}

SUCCESS: Responses = {200: {"headers": _ID}}
"""Documentation of a successful answer."""
_EVENT = {
    "type": "object",
    "description": "one event of the stream; its data is JSON, or [DONE] in the last",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
STREAMED: Responses = {200: {"headers": _ID, "content": {"text/event-stream": {"schema": _EVENT}}}}
"""Documentation of an endpoint that may answer with server-sent events."""


class Application(FastAPI):
    """FastAPI application whose OpenAPI schema includes models that no route declares.

    `takes` refers to the models in `bodies`, `answers` to those in `outputs`. For declared models FastAPI would build
    unused validators."""

    def __init__(self, bodies: Iterable[type[BaseModel]], outputs: Iterable[type[BaseModel]], **settings: Any) -> None:
        super().__init__(title="kvferry", version=VERSION, **settings)
        self._models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(body, "validation") for body in bodies]
        self._models += [(model, "serialization") for model in outputs]
        self._describing, self._described = asyncio.Lock(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; build the schema on a thread first if it is requested, which takes over half a second."""
        if not self._described and scope.get("path", "").endswith(str(self.openapi_url)):
            async with self._describing:
                await asyncio.to_thread(self.openapi)
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the schema, built at the first call."""
        if not self._described:
            described = super().openapi()
            _, found = models_json_schema(self._models, ref_template=_REFERENCE)
            described["components"]["schemas"].update(found["$defs"])
            self._described = True
        assert self.openapi_schema is not None
        return self.openapi_schema


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose endpoint parses its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def path_parameter(name: str) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose endpoint reads a path parameter itself.

    For declared parameters FastAPI documents a status 422 that never occurs."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def query_parameters(max_limit: int, **more: dict[str, Any]) -> dict[str, Any]:
    """Return the `openapi_extra` of a list whose endpoint reads its query itself.

    Documents `limit` up to `max_limit`, `after`, and the parameters `more` with their schemas."""
    known = {"limit": {"type": "integer", "minimum": 1, "maximum": max_limit}, "after": {"type": "string"}, **more}
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in known.items()]}


def answers(model: type[BaseModel], *statuses: int) -> Responses:
    """Describe the answers with these statuses, with Retry-After for those that clients should retry."""
    content = {"application/json": {"schema": _reference(model)}}
    return {
        status: {"content": content, "headers": {**_ID, **(_RETRY if status in RETRY_AFTER_S else {})}}
        for status in statuses
    }


def errors(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> Responses:
    """Describe the error responses with these statuses."""
    return answers(model, *statuses)
