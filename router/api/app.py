"""create_app: builds the router's ASGI application from all routes, with CORS and Ingress outermost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.types import ASGIApp

from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.responses import ResponseStore
from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.adapters import ADAPTER_BODIES, adapter_routes
from kvferry.router.api.answer_base import Endpoint
from kvferry.router.api.answers import (
    ChatAnswer,
    CompletionAnswer,
)
from kvferry.router.api.audio.endpoints import SPEECH_ENDPOINTS, SpeechEndpoint, SpeechRoute
from kvferry.router.api.batches.batches import BatchBody, batches_router
from kvferry.router.api.batches.files import files_router
from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.bodies.reader import BodyReader
from kvferry.router.api.cors import across_origins
from kvferry.router.api.documentation import STREAMED, SUCCESS, Application, errors, takes
from kvferry.router.api.formats.chat import ChatFormat
from kvferry.router.api.formats.chunks import chunks
from kvferry.router.api.formats.completions import CompletionFormat
from kvferry.router.api.generating_route import GeneratingRoute
from kvferry.router.api.http_errors import HANDLERS
from kvferry.router.api.inference_route import InflightLimit
from kvferry.router.api.infill.answer import InfillAnswer, InfillObject
from kvferry.router.api.infill.body import InfillBody
from kvferry.router.api.ingress import Ingress
from kvferry.router.api.keep_alive import KeepAlive
from kvferry.router.api.messages.answer import MessageAnswer
from kvferry.router.api.messages.answers import MessageErrorAnswer, MessageObject
from kvferry.router.api.messages.body import CountBody, MessagesBody
from kvferry.router.api.messages.chat import translate
from kvferry.router.api.messages.errors import PATH
from kvferry.router.api.messages.routes import counting
from kvferry.router.api.models_route import about
from kvferry.router.api.pooling.endpoints import POOLING_ENDPOINTS, PoolingRoute
from kvferry.router.api.probes import probes, targets
from kvferry.router.api.rendering_routes import rendering_routes
from kvferry.router.api.responses.answer import ResponseAnswer
from kvferry.router.api.responses.answers import ResponseObject
from kvferry.router.api.responses.background import Background
from kvferry.router.api.responses.body import ResponsesBody
from kvferry.router.api.responses.routes import kept_responses
from kvferry.router.api.responses.stored_responses import StoredResponses
from kvferry.router.api.resumed_routes import Exchanged, resumed_routes
from kvferry.router.api.served_models import ServedModels
from kvferry.router.api.sessions import session_routes
from kvferry.router.api.tokenization import DetokenizeBody, TokenizeBody
from kvferry.router.api.tokenization_routes import tokenization_routes
from kvferry.router.batch.batches import Batches
from kvferry.router.dashboard import routes as dashboard
from kvferry.router.dashboard.snapshot import SnapshotBuilder
from kvferry.router.journal.request_journals import RequestJournals
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.worker_peers.peers import WorkerPeers
from kvferry.runtime.rejection_throttle import RejectionThrottle

ENCODING = (400, 404, 413, 415, 429, 500)
GENERATING = (*ENCODING, 503, 504)
"""Error statuses of routes that only encode text, and of routes that generate."""


def endpoints(responses: StoredResponses, background: Background) -> tuple[Endpoint, ...]:
    """Return all generating endpoints, one line each."""
    chat, completion = chunks(ChatFormat), chunks(CompletionFormat)
    return (
        Endpoint(
            "/v1/chat/completions", "Answer a chat", ChatBody, chat, ChatAnswer, prefix="chatcmpl-"
        ),
        Endpoint(
            "/v1/completions", "Continue texts", CompletionBody, completion, CompletionAnswer,
            prefix="cmpl-",
        ),
        Endpoint(
            "/v1/responses",
            "Create a response",
            ResponsesBody,
            ResponseAnswer,
            ResponseObject,
            translate=responses.translate,
            later=background.begin,
            prefix="resp_",
            singly=True,
            numbers=True,
            always=responses.recorded,
        ),
        Endpoint(
            "/infill",
            "Fill in text between a prefix and a suffix (llama.cpp)",
            InfillBody,
            InfillAnswer,
            InfillObject,
            singly=True,
        ),
        Endpoint(
            PATH,
            "Create a message (Anthropic Messages API)",
            MessagesBody,
            MessageAnswer,
            MessageObject,
            MessageErrorAnswer,
            translate,
            prefix="msg_",
            singly=True,
        ),
    )  # fmt: skip


def create_app(
    settings: RouterSettings,
    pools: ServedModels,
    metrics: RouterMetrics,
    tenant_registry: TenantRegistry | None = None,
    kept: ResponseStore | None = None,
    batches: Batches | None = None,
    board: SnapshotBuilder | None = None,
    peers: WorkerPeers | None = None,
    throttle: RejectionThrottle | None = None,
    ownership: RouterOwnership | None = None,
    journals: RequestJournals | None = None,
) -> ASGIApp:
    """Build the application that serves the models of `pools` to the tenants of `tenant_registry`.

    The tenants default to those of the settings. It starts and stops nothing that it is given. Raises ConfigError for
    unreadable keys.

    kept      stores responses
    batches   batch jobs; None: none resume
    board     dashboard; None: no dashboard
    peers     other processes on the same port
    throttle  delay of rejections; None: no delay
    ownership work of this router in the cluster; None: of this process alone
    journals  records of requests; None: in this process
    """
    tenant_registry, batches, peers = (
        tenant_registry or TenantRegistry(settings),
        batches or Batches(settings),
        peers or WorkerPeers(),
    )
    ownership = ownership or RouterOwnership(MemoryRouterLeases(), is_shared=False)
    journals = journals or RequestJournals(settings, ownership.owner, metrics.journals, None)
    reader = BodyReader(settings.max_body_mib * 2**20)
    admission = InflightLimit(settings.max_inflight)
    responses = StoredResponses(kept)
    background = Background(responses, admission, peers, ownership)
    offered, shared = endpoints(responses, background), (pools, admission, reader, tenant_registry, metrics)
    keep_alive = KeepAlive()
    exchanges: dict[str, GeneratingRoute | PoolingRoute | SpeechRoute] = {
        each.path: GeneratingRoute(each, journals, keep_alive, *shared) for each in offered
    }
    created = exchanges["/v1/responses"]
    assert isinstance(created, GeneratingRoute)
    background.resume = created.continue_request
    exchanges |= {each.path: PoolingRoute(each, *shared) for each in POOLING_ENDPOINTS}
    exchanges |= {each.path: SpeechRoute(each, *shared) for each in SPEECH_ENDPOINTS}
    pooled = dict.fromkeys(each.body for each in POOLING_ENDPOINTS)
    bodies: list[type[BaseModel]] = [*(each.body for each in offered), *pooled]
    bodies += [CountBody, TokenizeBody, DetokenizeBody, BatchBody, *ADAPTER_BODIES]
    outputs = dict.fromkeys(each.error for each in offered)
    app = Application(bodies, outputs, exception_handlers=HANDLERS, redoc_url=None, swagger_ui_oauth2_redirect_url=None)
    guarded, refusals = (_guarded(), (401,)) if tenant_registry.keyring.guards else ({"responses": SUCCESS}, ())
    for router in (
        _working(exchanges, refusals),
        resumed_routes(offered, exchanges, (*GENERATING, *refusals)),
        kept_responses(responses, background, created, journals),
        counting(pools, reader, (*ENCODING, *refusals)),
        tokenization_routes(pools, reader, ENCODING),
        rendering_routes(pools, reader, (*ENCODING, *refusals)),
        files_router(batches, settings.files_mib * 2**20),
        batches_router(batches, reader),
        adapter_routes(pools, reader, settings.allow_lora_updates),
        session_routes(pools),
        about(pools),
        targets(pools),
    ):
        app.include_router(router, **guarded)
    if board is not None:
        boards = dashboard.DashboardRoutes(board, peers)
        app.include_router(dashboard.shown(boards, tenant_registry.keyring), **guarded)
        app.include_router(dashboard.page(boards, tenant_registry.keyring), responses=SUCCESS)
    app.include_router(probes(pools, metrics, peers, tenant_registry.keyring), responses=SUCCESS)
    batches.serve(app, exchanges, lambda: admission.count, tenant_registry.realm, tenant_registry.exists)
    return across_origins(Ingress(app, settings, tenant_registry, exchanges, throttle), settings)


def _guarded() -> dict[str, Any]:
    """Return the documentation of routes that need a key; Ingress has already checked the key."""
    bearer = HTTPBearer(scheme_name="key", auto_error=False)
    return {"dependencies": [Security(bearer)], "responses": {**SUCCESS, **errors(401)}}


def _working(
    exchanges: Mapping[str, GeneratingRoute | PoolingRoute | SpeechRoute], refusals: Sequence[int]
) -> APIRouter:
    router = APIRouter()
    for exchange in exchanges.values():
        endpoint, streamed = exchange.endpoint, {} if isinstance(exchange, PoolingRoute) else STREAMED
        router.post(
            endpoint.path,
            summary=endpoint.summary,
            response_model=endpoint.answer,
            responses={**streamed, **errors(*GENERATING, *refusals, model=endpoint.error)},
            openapi_extra=endpoint.takes if isinstance(endpoint, SpeechEndpoint) else takes(endpoint.body),
        )(_exchanged(exchange))
    return router


def _exchanged(exchange: ASGIApp) -> Callable[[], Awaitable[Response]]:
    async def generate() -> Response:
        return Exchanged(exchange)

    return generate
