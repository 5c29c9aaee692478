"""Embedding and classification by an adapter's engine: checks each job, and returns its vector or logits."""

from __future__ import annotations

import logging
import math
import sys
from array import array

from kvferry.engine_adapter.measured_pooling import NO_POOLING, MeasuredPooling
from kvferry.engine_adapter.pooling_engine import PoolingCall, PoolingEngine, PoolingTask
from kvferry.model_files.pooling_config import read_task
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError, InvalidRequest, StepFailed
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.work import Classify, Embed

log = logging.getLogger("kvferry.adapter")

GENERATES_ONLY = "this model's engine only generates: use a model for embeddings or scores"


class PoolingWork:
    """Work of one engine that generates nothing.

    measured: tasks that it can do. pooling: how hidden states become vectors, a value of POOLINGS; empty: unknown.
    """

    def __init__(self, engine: PoolingEngine | None, measured: MeasuredPooling, pooling: str) -> None:
        self._engine, self._measured, self._pooling = engine, measured, pooling

    def check(self, job: Job) -> None:
        """Raise InvalidRequest, naming the field, for what the engine cannot do."""
        if _task(job) not in self._measured.tasks:
            raise InvalidRequest(GENERATES_ONLY, param="model")
        if isinstance(job.work, Classify) and job.work.second_from:
            raise InvalidRequest(
                "pairs of texts cannot be scored: this model marks the second text, and its engine takes no marks "
                "beside tokens",
                param="model",
            )
        if not isinstance(job.work, Embed):
            return
        if self._measured.scaled and not job.work.normalize:
            raise InvalidRequest("normalize must be true: this model's engine scales its vectors", param="normalize")
        if not self._pooling:
            raise InvalidRequest(
                "it is unknown how this model's engine pools: start its adapter with --engine-pooling", param="model"
            )
        if job.work.pooling != self._pooling:
            raise InvalidRequest(
                f"the engine pools by {self._pooling}, but the router asks for {job.work.pooling}: start the router "
                f"with --pooling {self._pooling}, or the adapter with --engine-pooling",
                param="model",
            )

    async def delta(self, job: Job, request_id: str, adapter: str) -> TokenDelta:
        """Return the outcome of a job. adapter: name of a LoRA adapter; empty: none. Raises what the engine raises."""
        assert self._engine is not None
        call = PoolingCall(request_id, job.token_ids, adapter, job.namespace)
        found = await self._engine.pool(_task(job), call)
        if not found or not all(map(math.isfinite, found)):
            raise StepFailed("the engine's vector has numbers that are not finite")
        if isinstance(job.work, Embed):
            found = _shaped(found, job.work)
        if sys.byteorder == "big":
            found.byteswap()
        reuse = Reuse(len(job.token_ids), computed=len(job.token_ids))
        return TokenDelta(job.request_id, job.attempt, 0, (), finish_reason="stop", reuse=reuse, vector=found.tobytes())


def pooling_of(model: str, chosen: str) -> str:
    """Return how an engine pools, of `protocol.work.POOLINGS`: as chosen, or for "auto" as the model's files say.

    Empty if the files cannot be read. model: name or path of the model that the engine loaded."""
    if chosen != "auto":
        return chosen
    try:
        return read_task(resolve(model, weights=False)).pooling
    except (ConfigError, OSError) as error:
        log.warning("embeddings are refused, as it is unknown how the engine pools: set --engine-pooling (%s)", error)
        return ""


GENERATES = PoolingWork(None, NO_POOLING, "")
"""Work of an engine that only generates."""


def _task(job: Job) -> PoolingTask:
    return "classify" if isinstance(job.work, Classify) else "embed"


def _shaped(vector: array[float], work: Embed) -> array[float]:
    """Cut the vector to its first dimensions, then scale it, since cutting changes its length."""
    kept = vector[: work.dimensions or None]
    length = math.hypot(*kept) if work.normalize else 1.0
    return array("f", (each / length for each in kept)) if length not in (0.0, 1.0) else kept
