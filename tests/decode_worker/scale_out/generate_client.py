"""A client of the API of token ids on one node of the toy model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.worker_pair import PATIENCE_S, Worker

GENERATE = "/inference/v1/generate"


@dataclass
class Client:
    """HTTP client of one node."""

    node: Worker
    http: httpx.AsyncClient

    async def post(
        self, token_ids: list[int], *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Generate greedily unless told otherwise; sampling parameters are given as `params`."""
        params = {"temperature": 0.0, "max_tokens": 8, **fields.pop("params", {})}
        body = {"token_ids": token_ids, "sampling_params": params, **fields}
        return await self.http.post(GENERATE, json=body, headers=headers)

    async def whole(self, token_ids: list[int], **fields: Any) -> dict[str, Any]:
        answer = await self.post(token_ids, **fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def streamed(self, token_ids: list[int], **fields: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end with [DONE]."""
        async with self.streaming(token_ids, **fields) as chunks:
            return [chunk async for chunk in chunks]

    @contextlib.asynccontextmanager
    async def streaming(self, token_ids: list[int], **fields: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        params = {"temperature": 0.0, "max_tokens": 8, **fields.pop("params", {})}
        body = {"token_ids": token_ids, "sampling_params": params, "stream": True, **fields}
        async with self.http.stream("POST", GENERATE, json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield _chunks(answer)


async def _chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    done = False
    async for line in answer.aiter_lines():
        if not line:
            continue
        assert not done, "something follows [DONE]"
        assert line.startswith("data: ")
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line.removeprefix("data: "))
    assert done


@contextlib.asynccontextmanager
async def client_of(node: Worker) -> AsyncIterator[Client]:
    """A client, closed at the end."""
    async with httpx.AsyncClient(base_url=node.node.address.url, trust_env=False, timeout=PATIENCE_S) as http:
        yield Client(node, http)


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    """The tokens of all chunks of a stream."""
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def reasons_of(chunks: list[dict[str, Any]]) -> list[str]:
    """The finish reasons of all chunks of a stream."""
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
