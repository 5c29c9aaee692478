"""The OpenAPI description at /openapi.json and the page at /docs that shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from protocol.version import VERSION
from router.api.answers import ErrorAnswer

_REFERENCE = "#/components/schemas/{model}"
_LATER = {
    "retry-after": {"description": "seconds after which to try again", "schema": {"type": "integer", "minimum": 1}}
}
_ALWAYS = {"x-request-id": {"description": "the request's id", "schema": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. answer: of status 200, a model or the media type of plain text. streams: the answer may
    come as events. errors: statuses that answer with an error object; others: statuses with models of their own."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    streams: bool = False
    errors: tuple[int, ...] = ()
    others: tuple[tuple[int, type[BaseModel]], ...] = ()

    def models(self) -> list[type[BaseModel]]:
        found = [self.body, self.answer, *(model for _, model in self.others)]
        return [model for model in found if isinstance(model, type)]


def describe(operations: Sequence[Operation], *, guarded: Callable[[str], bool]) -> dict[str, Any]:
    """The OpenAPI object. `guarded`: whether clients must present a key for a path."""
    models: set[type[BaseModel]] = {ErrorAnswer}.union(*(operation.models() for operation in operations))
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(
            operation, guarded=guarded(operation.path)
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, *, guarded: bool) -> dict[str, Any]:
    responses = {"200": _response("success", operation.answer, _ALWAYS)}
    if operation.streams:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for status, model in operation.others:
        responses[str(status)] = _response(HTTPStatus(status).phrase, model, _headers(status))
    for status in sorted({*operation.errors, *((401,) if guarded else ())}):
        responses[str(status)] = _response(HTTPStatus(status).phrase, ErrorAnswer, _headers(status))
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": _schema(operation.body)}}
    if guarded:
        described["security"] = [{"key": []}]
    return described


def _headers(status: int) -> dict[str, Any]:
    return {**_ALWAYS, **_LATER} if status in (429, 503) else _ALWAYS


def _response(description: str, answer: type[BaseModel] | str, headers: dict[str, Any]) -> dict[str, Any]:
    if isinstance(answer, str):
        content: dict[str, Any] = {answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": _schema(answer)}
    return {"description": description, "headers": headers, "content": content}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
