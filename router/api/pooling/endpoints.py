"""Table of the pooling endpoints (embeddings, score, rerank, classify), and the route that serves them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvferry.router.api.admission import AdmittedRequest
from kvferry.router.api.answers import ErrorAnswer
from kvferry.router.api.bodies.reader import parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.inference_route import InferenceRoute
from kvferry.router.api.pooling.answers import ClassifyAnswer, EmbeddingAnswer, RerankAnswer, ScoreAnswer
from kvferry.router.api.pooling.embeddings import EmbeddingBody, embeddings
from kvferry.router.api.pooling.pooling_outputs import WholeAnswer
from kvferry.router.api.pooling.scoring import ClassifyBody, RerankBody, ScoreBody, classify, rerank, score
from kvferry.router.api.responder import Responder
from kvferry.router.api.served_models import ServedModel


@dataclass(frozen=True, slots=True)
class PoolingEndpoint:
    """A pooling endpoint: path, body type and operation, with summary and models for the documentation."""

    path: str
    summary: str
    body: type[RequestBody]
    work: Callable[[ServedModel, AdmittedRequest, Any], Awaitable[WholeAnswer]]
    answer: type[BaseModel]
    error: type[BaseModel] = ErrorAnswer


def _scores(path: str) -> PoolingEndpoint:
    return PoolingEndpoint(path, "Score pairs of texts", ScoreBody, score, ScoreAnswer)


def _ranks(path: str) -> PoolingEndpoint:
    return PoolingEndpoint(path, "Rank documents by relevance to a query", RerankBody, rerank, RerankAnswer)


def _classifies(path: str) -> PoolingEndpoint:
    return PoolingEndpoint(path, "Label texts", ClassifyBody, classify, ClassifyAnswer)


POOLING_ENDPOINTS = (
    PoolingEndpoint("/v1/embeddings", "Create embeddings", EmbeddingBody, embeddings, EmbeddingAnswer),
    *map(_scores, ("/v1/score", "/score")),
    *map(_ranks, ("/v1/rerank", "/v2/rerank", "/rerank")),
    *map(_classifies, ("/v1/classify", "/classify")),
)
"""All pooling endpoints."""


class PoolingRoute(InferenceRoute[PoolingEndpoint]):
    """Route of a pooling endpoint."""

    async def _work(self, admitted: AdmittedRequest, data: bytes, responder: Responder) -> WholeAnswer:
        body = await parsed(self.endpoint.body, data)
        return await self.endpoint.work(self._pools.pool(body.model), admitted, body)
