"""Dashboard's HTTP routes, and DashboardRoutes: its state, merged over the router's processes.

The page is open, like the chat page. Its data needs a key if keys are set. A tenant's key does not show the names of
other tenants' requests."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from kvferry.router.dashboard.merged import merged
from kvferry.router.dashboard.page import view, whole_page
from kvferry.router.dashboard.snapshot import SnapshotBuilder
from kvferry.router.dashboard.state import State
from kvferry.router.request_context import CALL
from kvferry.router.tenants.keyring import Keyring
from kvferry.router.worker_peers.peers import WorkerPeers

FRESH = {"cache-control": "no-store"}
"""Headers that forbid caching."""


class DashboardRoutes:
    """Dashboard of all processes that share the port, merged into one."""

    def __init__(self, snapshots: SnapshotBuilder, peers: WorkerPeers) -> None:
        self._snapshots, self._peers = snapshots, peers
        peers.answers["state"] = self._own_state

    async def state(self, viewer: str | None = None) -> State:
        """Return `SnapshotBuilder.state`, merged over all processes."""
        own = self._snapshots.state(viewer)
        if self._peers.alone:
            return own
        answers = (await self._peers.call("state", viewer)).values()
        return merged(own, [State.model_validate_json(each) for each in answers if each is not None], self._peers.count)

    async def _own_state(self, viewer: str | None) -> bytes:
        return self._snapshots.state(viewer).model_dump_json().encode()


def shown(dashboards: DashboardRoutes, keyring: Keyring) -> APIRouter:
    """Return the data routes, which need a key if keys are set."""
    router = APIRouter()

    async def state(request: Request) -> State:
        return await dashboards.state(request.scope[CALL].tenant or None if keyring.guards else None)

    @router.get("/dashboard/state", summary="State of the cluster as this router sees it", response_model=State)
    async def as_json(request: Request) -> Response:
        return Response((await state(request)).model_dump_json(), media_type="application/json", headers=FRESH)

    @router.get("/dashboard/view", summary="State of the cluster as an HTML fragment", response_class=HTMLResponse)
    async def as_html(request: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(view, await state(request)), headers=FRESH)

    return router


def page(dashboards: DashboardRoutes, keyring: Keyring) -> APIRouter:
    """Return the route of the page around the data."""
    router = APIRouter()

    @router.get("/dashboard", summary="Dashboard page", response_class=HTMLResponse)
    async def dashboard() -> Response:
        return await asyncio.to_thread(whole_page, None if keyring.guards else await dashboards.state())

    return router
