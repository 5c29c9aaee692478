"""Encode role of a node: computes media embeddings for routers, keeps them in pool blocks for other nodes to fetch.

A router has a request's media encoded before it dispatches the request, and names this node in the job. The node that
computes the prompt fetches the blocks like those of a prefix. The node's own tiers keep the rows, too, so those that
left the pool are read rather than computed. An embedding is a row per token. All state here belongs to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from fastapi import Request, Response

from kvferry.encode_worker.requests import read_encode
from kvferry.engine.engine import Engine
from kvferry.engine.events import Event
from kvferry.protocol.errors import DeadlineExceeded, Overloaded
from kvferry.protocol.media import Encoded, EncodeRequest, MediaItem
from kvferry.protocol.messages import CancelRequest
from kvferry.protocol.wire import pack
from kvferry.runtime.disconnect import until_disconnect
from kvferry.worker.endpoints import Endpoints
from kvferry.worker.service import NodeParts

T = TypeVar("T")
MAX_WAITING = 256
"""Maximum number of requests that wait for the encoder; further ones are refused, and encoded by another node."""


class EncodeService:
    """Service of an encode node. Implements `worker.service.Service`."""

    def __init__(self, base: NodeParts) -> None:
        self._base, self.endpoints = base, Endpoints(base)
        assert self.endpoints.embeddings is not None, "an encode node without an encoder"
        self._blocks, self._source = self.endpoints.embeddings.blocks, self.endpoints.embeddings.local
        self._tiers, self._running = self.endpoints.tiers.embeddings, 0
        base.app.post("/attempts/encode")(self.post_encode)

    async def post_encode(self, request: Request) -> Response:
        """Answer once the rows of all media are in blocks; a disconnect cancels work for this caller alone."""
        encode_request = await read_encode(request)
        self._base.require("encode")
        if self._running >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests are waiting for the encoder")
        self._running += 1
        try:
            async with asyncio.timeout(encode_request.deadline_s):
                computed = await until_disconnect(request.receive, self._encode(encode_request))
        except TimeoutError:
            raise DeadlineExceeded(f"not encoded after {encode_request.deadline_s:.3g} s") from None
        finally:
            self._running -= 1
        return Response(pack(Encoded(computed)), media_type="application/msgpack")

    def cancel(self, cancel: CancelRequest) -> None:
        """Do nothing: a router cancels by closing its connection."""

    def busy(self) -> bool:
        return self._running > 0 or self.endpoints.media.busy()

    def router_lost(self, router_id: str) -> None:
        """Do nothing: the router's connections are closed, too."""

    def stop(self) -> None:
        self.endpoints.stop()

    def to_link(self, events: Sequence[Event]) -> None:
        self.endpoints.take(events)

    def to_routers(self, events: Sequence[Event]) -> None:
        """Do nothing: there are no attempts."""

    async def _encode(self, encode_request: EncodeRequest) -> int:
        """Compute the rows that neither a block nor a tier holds; return the number of media that were encoded."""
        items = {item.hash: item for item in encode_request.media}
        runs = {name: self._blocks.hashes(encode_request.root, item) for name, item in items.items()}
        if missing := await self._missing(runs):
            await asyncio.gather(*(self._read_back(items[name], runs[name]) for name in missing))
            missing = await self._missing(runs)
        if not missing:
            return 0
        made = await self._made(encode_request.root, [items[name] for name in missing], encode_request.deadline_s)
        for name, rows in zip(missing, made, strict=True):
            await self._store(runs[name], rows)
        return len(missing)

    async def _missing(self, runs: Mapping[str, Sequence[bytes]]) -> list[str]:
        """Return the hashes of the media whose rows are not in blocks; the others count as used."""
        return await self._on_engine(lambda engine: [name for name, run in runs.items() if not self._blocks.touch(run)])

    async def _read_back(self, item: MediaItem, run: Sequence[bytes]) -> None:
        """Read a run from the node's tiers, if that is faster than encoding."""
        read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rate = self._base.rates.rates.media_tokens_per_s
        encode_s = item.length / rate if rate else 0.0

        def ended() -> None:
            self._base.call_soon(lambda: _settle(read, None))

        await self._on_engine(lambda engine: self._tiers.read(engine, run, encode_s, ended))
        await read

    async def _store(self, run: Sequence[bytes], rows: torch.Tensor) -> None:
        """Put rows into blocks, and write these to the tiers. Raises Overloaded."""

        def store(engine: Engine) -> bool:
            if stored := self._blocks.store(run, rows):
                self._tiers.keep(run)
            return stored

        if not await self._on_engine(store):
            raise Overloaded("there is no room for the embeddings of these media")

    async def _made(self, root: bytes, items: Sequence[MediaItem], limit_s: float) -> Sequence[torch.Tensor]:
        """Return the rows that this node's encoder computes. Raises the encoder's error."""
        made: asyncio.Future[Sequence[torch.Tensor]] = asyncio.get_running_loop().create_future()
        cancel = self._source.submit(
            root, items, lambda outcome: self._base.call_soon(lambda: _settle(made, outcome)), limit_s
        )
        try:
            return await made
        finally:
            if not made.done() or made.cancelled():
                cancel()

    async def _on_engine(self, call: Callable[[Engine], T]) -> T:
        """Return the result of a call on the engine thread."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run(engine: Engine) -> None:
            try:
                outcome: T | Exception = call(engine)
            except Exception as error:
                outcome = error
            self._base.call_soon(lambda: _settle(done, outcome))

        self._base.engine.submit(run)
        return await done


def _settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
