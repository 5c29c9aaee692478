"""POST /v1/embeddings: its body, and the embedding vectors of texts as numbers or base64."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.work import Embed
from kvferry.router.api.admission import AdmittedRequest
from kvferry.router.api.bodies.fields import Integer
from kvferry.router.api.pooling.body import InputBody
from kvferry.router.api.pooling.pooling_outputs import PoolingOutputs, WholeAnswer, encoded
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import dump

PAUSE_EVERY = 16
"""Number of vectors encoded as JSON before other requests get a turn of the event loop."""


class EmbeddingBody(InputBody):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    normalize: StrictBool | None = None


async def embeddings(pool: ServedModel, admitted: AdmittedRequest, body: EmbeddingBody) -> WholeAnswer:
    """Compute the answer; raise InvalidRequest, or the error of a dispatch."""
    work = embedding_work(pool, body.dimensions, body.normalize)
    prompts = await encoded(pool, body.input, "input", body.truncate_prompt_tokens)
    readings = PoolingOutputs(pool, admitted, prompts, [work] * len(prompts), body.cache_salt)
    data = []
    for index, vector in enumerate(await readings.vectors()):
        shown = _base64(vector) if body.encoding_format == "base64" else vector.tolist()
        data.append(dump({"object": "embedding", "index": index, "embedding": shown}))
        if index % PAUSE_EVERY == PAUSE_EVERY - 1:
            await asyncio.sleep(0)
    rest = dump({"model": pool.name, "usage": readings.usage()})
    return readings.written(b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:])


def embedding_work(pool: ServedModel, dimensions: int | None = None, normalize: bool | None = None) -> Embed:
    """Return the work for the nodes; raise InvalidRequest if the model has no vectors of this length."""
    task = pool.text.task
    if task.kind in ("classify", "transcribe"):
        raise InvalidRequest(f"the model {pool.name!r} does not embed: {task.description}", param="model")
    if dimensions is not None and task.width and dimensions > task.width:
        raise InvalidRequest(
            f"dimensions must be at most {task.width}, the length of this model's vectors, got {dimensions}",
            param="dimensions",
        )
    return Embed(task.pooling, task.normalize if normalize is None else normalize, dimensions or 0)


def _base64(vector: array[float]) -> str:
    """Encode a vector as base64 of little-endian float32."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
