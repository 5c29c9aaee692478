"""The router's HTTP application: routes, and nothing else."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.responses import Response

from protocol.errors import ModelNotFound
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from protocol.version import VERSION
from router.api import http_errors
from router.api.chat import ChatEndpoint
from router.api.completions import CompletionEndpoint
from router.api.envelope import Envelope
from router.api.exchange import Admission, Exchange
from router.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.api.serving import Serving
from router.api.sse import dump
from router.api.tokenization import detokenize, tokenize
from router.journey.spec import Cluster
from router.text.text_model import TextModel


def create_app(settings: RouterSettings, cluster: Cluster, text: TextModel, metrics: RouterMetrics) -> FastAPI:
    """The application that serves `text`'s model on `cluster`. It starts and stops neither."""
    app = FastAPI(title="kvferry", version=VERSION)
    serving = Serving(settings, cluster, text, metrics)
    http_errors.install(app)
    _add_generation(app, serving, Admission(settings.max_inflight))
    _add_models(app, serving)
    _add_text(app, serving)
    _add_operations(app, serving)
    app.add_middleware(Envelope, settings=settings)
    return app


def _add_generation(app: FastAPI, serving: Serving, admission: Admission) -> None:
    chat_endpoint, completion_endpoint = ChatEndpoint(serving), CompletionEndpoint(serving)

    @app.post("/v1/chat/completions", openapi_extra=_documented(ChatBody))
    async def chat_completions() -> Response:
        return Exchange(chat_endpoint, serving, admission)

    @app.post("/v1/completions", openapi_extra=_documented(CompletionBody))
    async def completions() -> Response:
        return Exchange(completion_endpoint, serving, admission)


def _add_models(app: FastAPI, serving: Serving) -> None:
    created = int(time.time())

    def model() -> dict[str, Any]:
        return {
            "id": serving.text.name,
            "object": "model",
            "created": created,
            "owned_by": "kvferry",
            "root": serving.text.name,
            "parent": None,
            "max_model_len": serving.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def model_by_id(name: str) -> Response:
        if name != serving.text.name:
            raise ModelNotFound(f"the model {name!r} does not exist here", param="model")
        return _json(model())


def _add_text(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", openapi_extra=_documented(TokenizeBody))
    async def tokenize_text(request: Request) -> Response:
        return _json(await tokenize(serving, await request.body()))

    @app.post("/detokenize", openapi_extra=_documented(DetokenizeBody))
    async def detokenize_ids(request: Request) -> Response:
        return _json(detokenize(serving, await request.body()))


def _add_operations(app: FastAPI, serving: Serving) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        nodes = serving.cluster.ready()
        if not nodes["decode"]:
            return _json({"status": "no node can serve yet", "nodes": nodes}, 503)
        return _json({"status": "ready", "nodes": nodes})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version_() -> Response:
        return _json({"version": VERSION})


def _json(value: Any, status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")


def _documented(body: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI text of a body that the endpoint parses itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
