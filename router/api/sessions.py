"""Route DELETE /v1/sessions/{session_id}: closes a session, whose cached blocks nodes then evict first."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sessions import session_name
from kvferry.router.api.documentation import errors, path_parameter
from kvferry.router.api.served_models import ServedModels
from kvferry.router.request_context import CALL

MAX_SESSION_ID = 256
"""Longest session id in a path, in characters."""


class SessionClosed(BaseModel):
    """Answer after a session was closed; the nodes are told within a moment."""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


def session_routes(pools: ServedModels) -> APIRouter:
    """Return the route that closes sessions."""
    router = APIRouter()

    @router.delete(
        "/v1/sessions/{session_id}",
        summary="Close a session: its cached blocks are the next to be evicted",
        responses=errors(400),
        openapi_extra=path_parameter("session_id"),
    )
    async def close(request: Request) -> SessionClosed:
        session_id = request.path_params["session_id"]
        if len(session_id) > MAX_SESSION_ID:
            raise InvalidRequest(f"session_id must have at most {MAX_SESSION_ID} characters", param="session_id")
        name = session_name(request.scope[CALL].tenant, session_id)
        for pool in pools:
            pool.cluster.close_session(name)
        return SessionClosed(id=session_id)

    return router
