"""Pydantic models of the pooling endpoints' responses, for the OpenAPI description and tests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ReadUsage(BaseModel):
    """Token counts; `prompt_tokens_details.cached_tokens` counts tokens that were not computed again."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Embedding(BaseModel):
    """Embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="numbers, or with encoding_format base64 their float32 bytes")


class EmbeddingAnswer(BaseModel):
    """Embeddings of all inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: ReadUsage


class Score(BaseModel):
    """Similarity score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """Scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ReadUsage


class Document(BaseModel):
    """Reranked document."""

    text: str


class Ranked(BaseModel):
    """One document's rank and relevance score."""

    index: int
    relevance_score: float
    document: Document | None = Field(default=None, description="absent with return_documents false")


class RerankAnswer(BaseModel):
    """Documents in order of relevance."""

    id: str
    model: str
    results: list[Ranked]
    usage: ReadUsage


class Classified(BaseModel):
    """Label and probabilities of one input."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(BaseModel):
    """Classification of all inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: ReadUsage
