"""What FastAPI's description at /openapi.json is told beside the routes: errors, headers, and bodies that endpoints
parse for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from process.refusal import RETRY_AFTER_S
from protocol.version import VERSION
from router.api.answers import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]
"""What FastAPI takes as `responses`, by status."""

_REFERENCE = "#/components/schemas/{model}"
_ID = {"x-request-id": {"description": "the request's id", "schema": {"type": "string"}}}
_LATER = {
    "retry-after": {"description": "seconds after which to try again", "schema": {"type": "integer", "minimum": 1}}
}

ANSWERED: Responses = {200: {"headers": _ID}}
_EVENT = {
    "type": "object",
    "description": "one event of the stream; its data is JSON, or [DONE] in the last",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
STREAMED: Responses = {200: {"headers": _ID, "content": {"text/event-stream": {"schema": _EVENT}}}}
"""Of an endpoint whose answer may come as events."""


class Application(FastAPI):
    """A FastAPI whose description also has the models of `bodies`, for routes that `takes` describes."""

    def __init__(self, bodies: Sequence[type[BaseModel]], **settings: Any) -> None:
        super().__init__(title="kvferry", version=VERSION, **settings)
        self._bodies = bodies

    def openapi(self) -> dict[str, Any]:
        """Made when it is first asked for."""
        if self.openapi_schema is None:
            described = super().openapi()
            _, found = models_json_schema([(body, "validation") for body in self._bodies], ref_template=_REFERENCE)
            described["components"]["schemas"].update(found["$defs"])
        assert self.openapi_schema is not None
        return self.openapi_schema


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose endpoint parses the body for itself."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def path_parameter(name: str) -> dict[str, Any]:
    """`openapi_extra` of a route whose endpoint reads a path parameter for itself: to declared ones FastAPI adds an
    answer of status 422 that never comes."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def query_parameters(most: int, **more: dict[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a list whose endpoint reads its query for itself: `limit` up to `most`, `after`, and others
    with their schemas."""
    known = {"limit": {"type": "integer", "minimum": 1, "maximum": most}, "after": {"type": "string"}, **more}
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in known.items()]}


def answers(model: type[BaseModel], *statuses: int) -> Responses:
    """What comes with these statuses; clients that are sent away learn when to come back."""
    return {
        status: {"model": model, "headers": {**_ID, **(_LATER if status in RETRY_AFTER_S else {})}}
        for status in statuses
    }


def errors(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> Responses:
    return answers(model, *statuses)
