"""Routes for operators: chat page, liveness, readiness, metrics, and scrape targets of all nodes."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.labels import ROLES
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.api.answers import Health, Ready, Targets
from kvferry.router.api.documentation import answers, errors
from kvferry.router.api.served_models import ServedModels
from kvferry.router.page.page import chat_page
from kvferry.router.tenants.keyring import Keyring
from kvferry.router.worker_peers.exposition import scraped
from kvferry.router.worker_peers.peers import WorkerPeers
from kvferry.runtime.rejection import retry_headers

NODES_VALUES = {None: False, "0": False, "false": False, "1": True, "true": True}
"""Accepted values of the query parameter `nodes`, by whether they ask for nodes."""
NODES = {"name": "nodes", "in": "query", "required": False, "schema": {"type": "boolean"}}
"""OpenAPI description of the query parameter `nodes`."""


def probes(pools: ServedModels, metrics: RouterMetrics, peers: WorkerPeers, keyring: Keyring) -> APIRouter:
    """Return the routes, which need no key (OPEN_PATHS); each process answers for all that share its port.

    With keys, a scrape shows tenants only to the key of the settings, and a tenant's key only that tenant."""
    router = APIRouter()

    async def own_metrics() -> bytes:
        return generate_latest(metrics.registry)

    async def own_trouble(placing: bool) -> bytes:
        return trouble(pools, placing).encode()

    peers.answers |= {"metrics": own_metrics, "trouble": own_trouble}

    @router.get("/", summary="Chat page", response_class=HTMLResponse)
    async def page() -> Response:
        return chat_page()

    @router.get(
        "/health",
        summary="Liveness: this process and all that share its port run",
        responses=answers(Health, 503),
    )
    async def health(response: Response) -> Health:
        silent = await peers.silent()
        if silent:
            response.status_code = 503
        return Health(status=f"no answer from router process {silent[0]}" if silent else "ok")

    @router.get(
        "/ready",
        summary="Readiness: Redis has answered and requests are accepted; with nodes=1 also that nodes can serve at "
        "least one model now",
        responses={**answers(Ready, 503), **errors(400)},
        openapi_extra={"parameters": [NODES]},
    )
    async def ready(request: Request, response: Response) -> Ready:
        placing = parse_nodes(request.query_params.get("nodes"))
        models = pools.ready()
        roles = (*ROLES, *(role for counts in models.values() for role in counts))
        nodes = {role: sum(counts.get(role, 0) for counts in models.values()) for role in roles}
        why = trouble(pools, placing) or await _peers_trouble(peers, placing)
        if why:
            response.status_code = 503
            response.headers.update(retry_headers(503))
        return Ready(status=why or "ready", nodes=nodes, models=models)

    @router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=PlainTextResponse)
    async def scrape(request: Request) -> Response:
        text = await scraped(metrics, peers, keyring.viewer(request.headers))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def parse_nodes(value: str | None) -> bool:
    """Return what the query parameter `nodes` means. Raises InvalidRequest for an unknown value."""
    if value not in NODES_VALUES:
        raise InvalidRequest(
            f"nodes must be 1 or 0, got {value!r:.40}; the answer counts the nodes of each role", param="nodes"
        )
    return NODES_VALUES[value]


def trouble(pools: ServedModels, placing: bool) -> str:
    """Return why this process takes no requests, or can place none now; empty if it can."""
    if pools.trouble or not placing:
        return pools.trouble
    serving = any(counts["decode"] for counts in pools.ready().values())
    return "" if serving else "no node can serve yet"


async def _peers_trouble(peers: WorkerPeers, placing: bool) -> str:
    """Return the first trouble of the other processes on the port; empty if there is none."""
    for number, reason in (await peers.call("trouble", placing)).items():
        if reason is None:
            return f"no answer from router process {number}"
        if reason:
            return f"router process {number}: {reason.decode()}"
    return ""


def targets(pools: ServedModels) -> APIRouter:
    """Return scrape targets for Prometheus' `http_sd_configs`; nodes' ports come from their leases."""
    router = APIRouter()

    @router.get("/targets", summary="Prometheus HTTP service discovery: the metrics endpoints of all nodes")
    async def found() -> list[Targets]:
        nodes = sorted((lease for pool in pools for lease in pool.cluster.leases()), key=lambda lease: lease.node_id)
        return [Targets(targets=[urlsplit(node.http_url).netloc], labels=_labels(node)) for node in nodes]

    return router


def _labels(node: NodeLease) -> dict[str, str]:
    encrypted = {"__scheme__": "https"} if node.http_url.startswith("https:") else {}
    return {"component": node.role, "node": node.node_id, **encrypted}
