"""The router's HTTP application: routes, what they are documented as, and nothing else."""

from __future__ import annotations

import time
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from protocol.version import VERSION
from router.api.answers import (
    ChatAnswer,
    CompletionAnswer,
    Health,
    Model,
    ModelList,
    Ready,
    Text,
    Tokens,
    Version,
)
from router.api.chat import ChatShape
from router.api.completions import CompletionShape
from router.api.documentation import Operation, describe
from router.api.door import OPEN_PATHS, Admission, BodyReader, Door, Exchange
from router.api.http_errors import HANDLERS, retry_headers
from router.api.pool import Pool, Pools
from router.api.schemas import ChatBody, CompletionBody
from router.api.shape import Endpoint
from router.api.sse import dump
from router.api.tokenization import DetokenizeBody, TokenizeBody, detokenize, tokenize
from router.journey.spec import Cluster
from router.text.encoding import Encoder
from router.text.text_model import TextModel

JSON = "application/json"
GENERATING = (400, 404, 413, 429, 500, 503, 504)
ENCODING = (400, 404, 413, 429, 500)
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "Answer a chat", ChatAnswer, ChatBody, streams=True, errors=GENERATING),
    Operation(
        "POST", "/v1/completions", "Continue texts", CompletionAnswer, CompletionBody, streams=True, errors=GENERATING
    ),
    Operation("POST", "/tokenize", "Text or messages to token ids", Tokens, TokenizeBody, errors=ENCODING),
    Operation("POST", "/detokenize", "Token ids to text", Text, DetokenizeBody, errors=ENCODING),
    Operation("GET", "/v1/models", "The models that are served", ModelList),
    Operation("GET", "/v1/models/{id}", "One of them", Model, errors=(404,)),
    Operation("GET", "/health", "The process runs", Health),
    Operation("GET", "/ready", "A request could be placed now", Ready, others=((503, Ready),)),
    Operation("GET", "/metrics", "Prometheus' text format", "text/plain"),
    Operation("GET", "/version", "The version", Version),
)
ENDPOINTS = (
    Endpoint("/v1/chat/completions", ChatBody, ChatShape),
    Endpoint("/v1/completions", CompletionBody, CompletionShape),
)


def create_app(settings: RouterSettings, cluster: Cluster, text: TextModel, metrics: RouterMetrics) -> ASGIApp:
    """The application that serves `text`'s model on `cluster`. It starts and stops neither."""
    pools = Pools(Pool(text, cluster, metrics, Encoder(text)))
    reader = BodyReader(settings.max_body_mib * 2**20)
    admission = Admission(settings.max_inflight)
    exchanges = {each.path: Exchange(each, pools, admission, reader, metrics) for each in ENDPOINTS}
    routes = [
        *(Route(path, exchange, methods=["POST"]) for path, exchange in exchanges.items()),
        *_text(pools, reader),
        *_models(pools),
        *_state(pools, metrics),
        *_documentation(keyed=bool(settings.api_key)),
    ]
    return Door(Starlette(routes=routes, exception_handlers=HANDLERS), settings, exchanges)


def _text(pools: Pools, reader: BodyReader) -> list[Route]:
    async def tokenized(request: Request) -> Response:
        return _json(await tokenize(pools, await reader.read(request)))

    async def detokenized(request: Request) -> Response:
        return _json(detokenize(pools, await reader.read(request)))

    return [Route("/tokenize", tokenized, methods=["POST"]), Route("/detokenize", detokenized, methods=["POST"])]


def _models(pools: Pools) -> list[Route]:
    created = int(time.time())

    def model(pool: Pool) -> dict[str, Any]:
        return {
            "id": pool.name,
            "object": "model",
            "created": created,
            "owned_by": "kvferry",
            "root": pool.name,
            "parent": None,
            "max_model_len": pool.max_model_len,
        }

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [model(pool) for pool in pools]})

    async def model_by_id(request: Request) -> Response:
        return _json(model(pools.pool(request.path_params["id"])))

    return [Route("/v1/models", models), Route("/v1/models/{id:path}", model_by_id)]


def _state(pools: Pools, metrics: RouterMetrics) -> list[Route]:
    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        nodes = pools.ready()
        if not nodes["decode"]:
            return _json({"status": "no node can serve yet", "nodes": nodes}, 503, retry_headers(503))
        return _json({"status": "ready", "nodes": nodes})

    async def scrape(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def version(_: Request) -> Response:
        return _json({"version": VERSION})

    routes = {"/health": health, "/ready": ready, "/metrics": scrape, "/version": version}
    return [Route(path, endpoint) for path, endpoint in routes.items()]


def _documentation(*, keyed: bool) -> list[Route]:
    description = dump(describe(OPERATIONS, guarded=lambda path: keyed and path not in OPEN_PATHS))

    async def openapi(_: Request) -> Response:
        return Response(description, media_type=JSON)

    async def docs(_: Request) -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title="kvferry")

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, JSON)
