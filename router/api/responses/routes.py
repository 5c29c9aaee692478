"""Routes that fetch, cancel and delete stored responses, and list their input items."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.types import ASGIApp

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.documentation import errors, path_parameter
from kvferry.router.api.responses.answers import DeletedResponse, InputItems, ResponseObject
from kvferry.router.api.responses.background import Background
from kvferry.router.api.responses.stored_responses import StoredResponses
from kvferry.router.api.resumed_routes import events_after
from kvferry.router.journal.request_journals import RequestJournals
from kvferry.router.request_context import CALL

_PLACE = "/v1/responses/{id}"
_MAX_ITEMS = 100


def kept_responses(
    responses: StoredResponses, background: Background, created: ASGIApp, journals: RequestJournals
) -> APIRouter:
    """Return the routes of stored responses; `created` is the route that creates them."""
    router = APIRouter(responses=errors(404, 503))

    @router.get(
        _PLACE,
        summary="Retrieve a stored response",
        response_model=ResponseObject,
        openapi_extra=_id("stream", "starting_after"),
    )
    async def fetched(request: Request) -> Any:
        if request.query_params.get("stream") in ("true", "1"):
            return events_after(request, created)
        return (await responses.get(*_tenant_and_id(request))).response

    @router.delete(_PLACE, summary="Delete a stored response", response_model=DeletedResponse, openapi_extra=_id())
    async def deleted(request: Request) -> dict[str, Any]:
        tenant, name = _tenant_and_id(request)
        await background.drop(tenant, name)
        await responses.delete(tenant, name)
        await journals.forget(tenant, name)
        return {"id": name, "object": "response", "deleted": True}

    @router.get(
        _PLACE + "/input_items",
        summary="List the input items of a response",
        response_model=InputItems,
        responses=errors(400),
        openapi_extra=_id("after", "limit", "order"),
    )
    async def input_items(request: Request) -> dict[str, Any]:
        kept = await responses.get(*_tenant_and_id(request))
        return _listed(kept.input, dict(request.query_params))

    @router.post(
        _PLACE + "/cancel",
        summary="Cancel a background response",
        response_model=ResponseObject,
        responses=errors(400),
        openapi_extra=_id(),
    )
    async def cancelled(request: Request) -> dict[str, Any]:
        return await background.cancel(*_tenant_and_id(request))

    return router


def _tenant_and_id(request: Request) -> tuple[str, str]:
    return request.scope[CALL].tenant, request.path_params["id"]


def _id(*query: str) -> dict[str, Any]:
    described = path_parameter("id")
    described["parameters"] += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in query]
    return described


def _listed(items: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """Return a page of the items, latest first by default; raise InvalidRequest."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_ITEMS):
        raise InvalidRequest(f"limit must be 1 to {_MAX_ITEMS}", param="limit")
    rows = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(rows) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after: there is no item {after!r}", param="after")
        rows = rows[places[0] + 1 :]
    page = rows[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(rows) > len(page),
    }
