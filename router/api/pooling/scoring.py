"""Scores, reranks and classifies texts for /v1/score, /v1/rerank and /v1/classify, as vLLM, Jina and Cohere do.

A model with a cross-encoder head scores texts in pairs. Other models use the cosine of the texts' embeddings, and each
text is embedded once."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT
from kvferry.protocol.work import Classify
from kvferry.router.api.admission import AdmittedRequest
from kvferry.router.api.bodies.fields import Integer
from kvferry.router.api.pooling.body import MAX_INPUTS, InputBody, PoolingBody
from kvferry.router.api.pooling.embeddings import embedding_work
from kvferry.router.api.pooling.pooling_outputs import PoolingOutputs, WholeAnswer, encoded, encoded_pairs
from kvferry.router.api.served_models import ServedModel

PAUSE_EVERY = 64
"""Number of scores computed in the router before other requests get a turn of the event loop."""


def _texts(value: Any) -> Any:
    """Convert one text or several to a list; documents of Cohere and Jina may be objects with a text."""
    items = value if isinstance(value, list) else [value]
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string, or a list of strings or of objects with a string `text`")
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise ValueError(f"must hold 1 to {MAX_INPUTS} texts, got {len(texts)}")
    return texts


_TEXT = {
    "anyOf": [{"type": "string"}, {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}]
}
_SCHEMA = {"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}]}
Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_SCHEMA)]


class ScoreBody(PoolingBody):
    """Body of POST /v1/score: one text against each of several, or pairs of two lists of equal length."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    def check(self) -> None:
        """Raise InvalidRequest if the texts cannot be paired."""
        super().check()
        firsts, seconds = self.sides()
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequest(
                f"{len(firsts)} texts cannot be paired with {len(seconds)}: give one, or as many", param=self.fields[0]
            )

    @property
    def fields(self) -> tuple[str, str]:
        """Return the names of the fields that hold the texts."""
        return ("text_1", "text_2") if self.text_1 is not None else ("queries", "documents")

    def sides(self) -> tuple[list[str], list[str]]:
        """Return both lists of texts; raise InvalidRequest if one is missing."""
        first, second = self.fields
        for field in self.fields:
            if getattr(self, field) is None:
                raise InvalidRequest("give text_1 and text_2, or queries and documents", param=field)
        return getattr(self, first), getattr(self, second)


class RerankBody(PoolingBody):
    """Body of POST /v1/rerank: documents to order by their relevance to the query."""

    query: str
    documents: Texts
    top_n: Annotated[Integer, Field(ge=0, le=MAX_COUNT)] | None = None
    return_documents: StrictBool | None = True


class ClassifyBody(InputBody):
    """Body of POST /v1/classify."""


async def score(pool: ServedModel, admitted: AdmittedRequest, body: ScoreBody) -> WholeAnswer:
    """Score pairs of texts; raise InvalidRequest, or the error of a dispatch."""
    firsts, seconds = body.sides()
    pairs = list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))
    readings, scores = await _scores(pool, admitted, pairs, body, body.fields)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return readings.answer({**_head("score", pool, admitted), "data": data, "usage": readings.usage()})


async def rerank(pool: ServedModel, admitted: AdmittedRequest, body: RerankBody) -> WholeAnswer:
    """Order documents by relevance; raise InvalidRequest, or the error of a dispatch."""
    pairs = [(body.query, document) for document in body.documents]
    readings, scores = await _scores(pool, admitted, pairs, body, ("query", "documents"))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    shown = [
        {"index": index, "relevance_score": scores[index]}
        | ({} if body.return_documents is False else {"document": {"text": body.documents[index]}})
        for index in order[: body.top_n or None]
    ]
    head = {"id": f"rerank-{admitted.call.id}", "model": pool.name}
    return readings.answer({**head, "results": shown, "usage": readings.usage()})


async def classify(pool: ServedModel, admitted: AdmittedRequest, body: ClassifyBody) -> WholeAnswer:
    """Classify texts; raise InvalidRequest, or the error of a dispatch."""
    task = pool.text.task
    if task.kind != "classify":
        raise InvalidRequest(f"the model {pool.name!r} does not classify: {task.description}", param="model")
    prompts = await encoded(pool, body.input, "input", body.truncate_prompt_tokens)
    readings = PoolingOutputs(pool, admitted, prompts, [Classify()] * len(prompts), body.cache_salt)
    data = []
    for index, logits in enumerate(await readings.vectors()):
        probs = activated(logits, "sigmoid" if task.activation == "none" and len(logits) == 1 else task.activation)
        label = task.labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    return readings.answer({**_head("classify", pool, admitted), "data": data, "usage": readings.usage()})


async def _scores(
    pool: ServedModel,
    admitted: AdmittedRequest,
    pairs: Sequence[tuple[str, str]],
    body: PoolingBody,
    fields: tuple[str, str],
) -> tuple[PoolingOutputs, list[float]]:
    """Return the score of each pair; `fields` name both texts in errors."""
    task = pool.text.task
    if task.kind == "classify" and not task.scores_pairs:
        raise InvalidRequest(f"the model {pool.name!r} does not score pairs: {task.description}", param="model")
    if task.kind != "classify":
        return await _cosines(pool, admitted, pairs, body, fields)
    found = await encoded_pairs(pool, pairs, fields[1], body.truncate_prompt_tokens)
    works = [Classify(second if task.typed else 0) for _, second in found]
    readings = PoolingOutputs(pool, admitted, [ids for ids, _ in found], works, body.cache_salt)
    return readings, [activated(logits, task.activation)[0] for logits in await readings.vectors()]


async def _cosines(
    pool: ServedModel,
    admitted: AdmittedRequest,
    pairs: Sequence[tuple[str, str]],
    body: PoolingBody,
    fields: tuple[str, str],
) -> tuple[PoolingOutputs, list[float]]:
    work = embedding_work(pool, normalize=True)
    places: dict[str, int] = {}
    prompts: list[list[int]] = []
    for field, side in zip(fields, zip(*pairs, strict=True), strict=True):
        new = [text for text in dict.fromkeys(side) if text not in places]
        places |= {text: len(prompts) + place for place, text in enumerate(new)}
        prompts += await encoded(pool, new, field, body.truncate_prompt_tokens)
    readings, scores = PoolingOutputs(pool, admitted, prompts, [work] * len(prompts), body.cache_salt), []
    vectors = await readings.vectors()
    for number, (first, second) in enumerate(pairs):
        scores.append(sum(map(mul, vectors[places[first]], vectors[places[second]])))
        if number % PAUSE_EVERY == PAUSE_EVERY - 1:
            await asyncio.sleep(0)
    return readings, scores


def activated(logits: array[float], activation: str) -> list[float]:
    """Apply softmax or sigmoid, or return the logits unchanged."""
    if activation == "softmax":
        top = max(logits)
        powers = [math.exp(logit - top) for logit in logits]
        return [power / sum(powers) for power in powers]
    return [_sigmoid(logit) for logit in logits] if activation == "sigmoid" else list(logits)


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def _head(kind: str, pool: ServedModel, admitted: AdmittedRequest) -> dict[str, Any]:
    return {"id": f"{kind}-{admitted.call.id}", "object": "list", "created": int(time.time()), "model": pool.name}
