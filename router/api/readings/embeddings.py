"""POST /v1/embeddings: a vector for each input, each by a job of its own."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from typing import Annotated, Literal

from pydantic import Field

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_COUNT
from protocol.work import Embed
from router.api.bodies.fields import Prompts
from router.api.bodies.generating import RequestBody
from router.api.pool import Pool
from router.api.readings.readings import Readings, WholeAnswer, encoded, names_of
from router.api.sse import dump
from router.api.visit import Visit

MAX_INPUTS = 2048
PAUSE_EVERY = 16
"""Vectors written in JSON before other requests get a turn."""
Truncate = Annotated[int, Field(ge=-1, le=MAX_COUNT)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]


class EmbeddingBody(RequestBody):
    """POST /v1/embeddings. `input` becomes a list of texts and tuples of token ids."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt_tokens: Truncate | None = None
    normalize: bool | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None

    def check(self) -> None:
        if not 1 <= len(self.input) <= MAX_INPUTS:
            raise InvalidRequest(f"input must hold 1 to {MAX_INPUTS} items, got {len(self.input)}", param="input")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")


async def embeddings(pool: Pool, visit: Visit, body: EmbeddingBody) -> WholeAnswer:
    """Raises InvalidRequest, and what a journey raises."""
    work = embedding_work(pool, body.dimensions, body.normalize)
    prompts = await encoded(pool, body.input, "input", body.truncate_prompt_tokens)
    names = names_of(visit.call.id, len(prompts))
    specs = [pool.spec(visit.call, *each, work, body.cache_salt) for each in zip(names, prompts, strict=True)]
    readings = Readings(pool, visit, specs)
    data = []
    for index, vector in enumerate(await readings.vectors()):
        shown = _base64(vector) if body.encoding_format == "base64" else vector.tolist()
        data.append(dump({"object": "embedding", "index": index, "embedding": shown}))
        if index % PAUSE_EVERY == PAUSE_EVERY - 1:
            await asyncio.sleep(0)
    rest = dump({"model": pool.name, "usage": readings.usage()})
    return readings.written(b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:])


def embedding_work(pool: Pool, dimensions: int | None = None, normalize: bool | None = None) -> Embed:
    """What the model's nodes are asked for. Raises InvalidRequest: it makes no vectors, or none so long."""
    task = pool.text.task
    if task.kind == "classify":
        raise InvalidRequest(f"the model {pool.name!r} does not embed: {task.told}", param="model")
    if dimensions is not None and task.width and dimensions > task.width:
        raise InvalidRequest(
            f"dimensions must be at most {task.width}, the length of this model's vectors, got {dimensions}",
            param="dimensions",
        )
    return Embed(task.pooling, task.normalize if normalize is None else normalize, dimensions or 0)


def _base64(vector: array[float]) -> str:
    """Of float32 in little-endian order."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
