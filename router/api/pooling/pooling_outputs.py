"""PoolingOutputs: runs a request's prompts on nodes and collects their vectors in order; also encodes the prompts."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.protocol.errors import ContextLengthExceeded, InvalidRequest, KvferryError
from kvferry.protocol.work import Work, floats
from kvferry.router.api.admission import AdmittedRequest, TokenUsage
from kvferry.router.api.bodies.fields import Prompt
from kvferry.router.api.generation import count_prompt
from kvferry.router.api.responder import Responder
from kvferry.router.api.served_models import ServedModel
from kvferry.router.api.sse import dump
from kvferry.router.dispatch.interface import RequestSpec, Route
from kvferry.router.request_context import request_names
from kvferry.router.tenants.scheduler_slots import Size
from kvferry.router.text.encoding import Bound

MAX_CONCURRENT = 64
"""Number of prompts of one request on the nodes at once, so that large requests do not block others."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Complete JSON body with its headers."""

    data: bytes
    headers: Mapping[str, str]

    async def finish(self, responder: Responder) -> None:
        """Send the body."""
        await responder.json(200, self.data, self.headers)


class PoolingOutputs:
    """Pooling of one HTTP request's prompts.

    `vectors` waits for a slot and runs MAX_CONCURRENT dispatches at a time. If one fails or the client leaves, all end.
    `route` is that of the first prompt, once its vector has arrived."""

    def __init__(
        self,
        pool: ServedModel,
        admitted: AdmittedRequest,
        prompts: Sequence[Sequence[int]],
        works: Sequence[Work],
        cache_salt: str | None,
    ) -> None:
        self.route: Route | None = None
        self._pool, self._admitted = pool, admitted
        requests = zip(request_names(admitted.call, len(prompts)), prompts, works, strict=True)
        self._specs = [pool.spec(admitted.call, *each, cache_salt) for each in requests]
        self._found: list[array[float]] = [array("f")] * len(prompts)
        self._used = TokenUsage()

    async def vectors(self) -> list[array[float]]:
        """Return the vectors of all prompts, in order; raise the error of the first dispatch that fails."""
        size = Size(1, sum(len(spec.token_ids) for spec in self._specs), 0)
        turn = await self._admitted.turn(self._pool.turns, size)
        self._specs = [replace(spec, newcomer=turn.newcomer) for spec in self._specs]
        open_specs = iter(enumerate(self._specs))
        workers = [asyncio.create_task(self._read(open_specs)) for _ in self._specs[:MAX_CONCURRENT]]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._found

    def usage(self) -> dict[str, Any]:
        """Return the API's usage object."""
        tokens, details = self._used.prompt, {"cached_tokens": self._used.cached}
        return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}

    def answer(self, body: Mapping[str, Any]) -> WholeAnswer:
        """Return the answer with the header that shows the first prompt's route."""
        return self.written(dump(body))

    def written(self, data: bytes) -> WholeAnswer:
        """Return the answer with this header for a body that is JSON already."""
        return WholeAnswer(data, {} if self.route is None else {"x-kvferry-route": str(self.route)})

    async def _read(self, specs: Iterator[tuple[int, RequestSpec]]) -> None:
        for index, spec in specs:
            dispatch = self._pool.cluster.start(spec)
            vector: bytes | None = None
            async for output in dispatch:
                vector = output.vector
            if vector is None:
                raise KvferryError("a node ended the request without an embedding")
            self._found[index] = floats(vector)
            self._count(spec, dispatch.route)
            if index == 0:
                self.route = dispatch.route

    def _count(self, spec: RequestSpec, route: Route | None) -> None:
        """Count a prompt's tokens; the first vector also starts the request's admission accounting."""
        begins, cached = not self._used.prompt, 0
        if route is not None:
            count_prompt(self._pool.metrics, route)
            cached = route.reuse.cached_len
        self._used = TokenUsage(self._used.prompt + len(spec.token_ids), self._used.cached + cached)
        if begins:
            self._admitted.began(lambda: self._used)


async def encoded(pool: ServedModel, prompts: Sequence[Prompt], field: str, truncate: int | None) -> list[list[int]]:
    """Return the token ids of each prompt, texts with the model's special tokens.

    `truncate` keeps that many tokens from the left; -1 keeps as many as the model takes. Raises InvalidRequest naming
    the field."""
    limit = pool.max_model_len
    kept = limit if truncate is None else _kept(truncate, limit)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    bound = Bound(limit, field, truncated=truncate is not None)
    found = iter(await pool.encoder.encode(texts, bound, add_special_tokens=True))
    made: list[list[int]] = []
    for prompt in prompts:
        ids = next(found) if isinstance(prompt, str) else list(prompt)
        if truncate is not None:
            ids = pool.text.tokenizer.cut(ids, kept) if isinstance(prompt, str) else ids[:kept]
        check_prompt(pool, ids, field)
        made.append(ids)
    return made


async def encoded_pairs(
    pool: ServedModel, pairs: Sequence[tuple[str, str]], field: str, truncate: int | None
) -> list[tuple[list[int], int]]:
    """Return the token ids of each pair, and the index at which its second text begins.

    `truncate` cuts the end of the second text. Raises InvalidRequest naming the field."""
    limit = pool.max_model_len
    bound = Bound(limit, field, truncated=truncate is not None)
    made: list[tuple[list[int], int]] = []
    for ids, second in await pool.encoder.encode_pairs(pairs, bound):
        if truncate is not None:
            ids = pool.text.tokenizer.cut(ids, _kept(truncate, limit))
            if second >= len(ids):
                raise InvalidRequest(
                    f"truncate_prompt_tokens: {len(ids)} tokens leave no room for the second text after the first, "
                    f"which has {second}",
                    param="truncate_prompt_tokens",
                )
        check_prompt(pool, ids, field)
        made.append((ids, second))
    return made


def check_prompt(pool: ServedModel, ids: Sequence[int], field: str) -> None:
    """Raise InvalidRequest unless the model can process the tokens."""
    limit = pool.max_model_len
    if not ids:
        raise InvalidRequest(f"{field} must hold at least one token in each item", param=field)
    pool.check_ids(ids, field)
    if len(ids) > limit:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limit} tokens, but an item of {field} has {len(ids)}; shorten it "
            "or set truncate_prompt_tokens",
            param=field,
        )


def _kept(truncate: int, limit: int) -> int:
    if truncate > limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at most {limit}, the model's context length, got {truncate}",
            param="truncate_prompt_tokens",
        )
    return limit if truncate < 0 else truncate
