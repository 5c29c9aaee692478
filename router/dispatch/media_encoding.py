"""MediaEncoding: has an encode node encode an attempt's images and audio before the attempt is sent.

If an encode node is lost, suspected, late or full, another one is called; after that, the node that computes the
prompt encodes the media itself. So no request fails because of encode nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from kvferry.placement.encoders import Encoder, ranked
from kvferry.protocol.errors import KvferryError, NodeLost
from kvferry.protocol.hashing import embedding_hashes, root_hash
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.media import Encoded, EncodeRequest, MediaItem, with_data, without_data
from kvferry.protocol.messages import DecodeTarget, GenerateRequest, Job, PrefillRequest
from kvferry.protocol.wire import pack
from kvferry.router.dispatch.prefixes import Prefixes
from kvferry.router.dispatch.router_services import RouterServices
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes, takes
from kvferry.router.nodes.node_entry import NodeEntry, node_key
from kvferry.router.nodes.watched_call import watched

log = logging.getLogger(__name__)

MAX_TRIES = 2
"""Maximum number of encode nodes called for one attempt, one after the other."""
MIN_LIMIT_S, LIMIT_FACTOR = 2.0, 4.0
"""Time limit of a call: MIN_LIMIT_S seconds, plus LIMIT_FACTOR times the expected seconds."""


class MediaEncoding:
    """Calls of one model's nodes for attempts, with the media encoded first. Implements `AttemptCalls`.

    plain: the calls for attempts without media."""

    def __init__(self, model: ModelNodes, shared: RouterServices) -> None:
        self._model, self._nodes, self._metrics = model, shared.nodes, shared.metrics.encodes
        self.plain: NodeClient = shared.client
        self._prefixes: Prefixes = shared.prefixes
        self.drop, self.move = shared.client.drop, shared.client.move

    async def prefill(self, node: NodeLease, request: PrefillRequest, deliver: Callable[[Any], None]) -> None:
        """Send the attempt with the encode node that has its media; see `NodeClient.prefill`."""
        await self.plain.prefill(node, replace(request, job=await self._encoded(request.job, node)), deliver)

    async def generate(self, node: NodeLease, request: GenerateRequest) -> None:
        """Send the attempt with the encode node that has its media; see `NodeClient.generate`."""
        await self.plain.generate(node, replace(request, job=await self._encoded(request.job, node)))

    def ready(self) -> dict[str, int]:
        """Return how many encode nodes can take a request now, by role; empty if the model has none."""
        return {"encode": len(self._usable())} if self._model.encoders else {}

    async def _encoded(self, job: Job, node: NodeLease) -> Job:
        """Return the job with the node from which its media's rows can be fetched, if one has them."""
        items = [item for item in job.media if item.offset + item.length > job.predicted[0]]
        able = self._usable({item.modality for item in items}, node.fingerprint) if items else []
        if not able or not node.media_row_bytes:
            return job
        began = time.monotonic()
        root = root_hash(node.fingerprint, job.namespace, job.adapter)
        encoders, own = await self._views(able, node, items, root)
        if not own.missing:
            return job
        encoder = await self._first(ranked(encoders, own), EncodeRequest(root, tuple(items), job.deadline_s), began)
        waited_s = time.monotonic() - began
        if encoder is None:
            self._metrics.calls["local"].inc()
        else:
            self._metrics.seconds.observe(waited_s)
        return replace(job, encoder=encoder, deadline_s=max(0.0, job.deadline_s - waited_s))

    async def _first(self, choices: Sequence[Encoder], request: EncodeRequest, began: float) -> DecodeTarget | None:
        """Return the first of these nodes that makes the rows; None if none does."""
        for choice in choices[:MAX_TRIES]:
            entry, left_s = self._nodes.entries.get(choice.key), request.deadline_s - (time.monotonic() - began)
            max_s = MIN_LIMIT_S + LIMIT_FACTOR * choice.seconds
            if entry is not None and left_s > 0 and await self._encodes(entry, request, min(left_s, max_s), max_s):
                return entry.lease.target
        return None

    async def _encodes(self, entry: NodeEntry, request: EncodeRequest, limit_s: float, max_s: float) -> bool:
        """Have a node make the rows within limit_s seconds; return whether it has them all.

        A node that had less than max_s seconds, since the request is nearly out of time, is not blamed for it."""
        began = time.monotonic()
        try:
            tokens, call = sum(item.length for item in request.media), replace(request, deadline_s=limit_s)
            encoded = await watched(entry, self._call(entry.lease, call), limit_s, tokens)
        except KvferryError as error:
            self._metrics.calls["failed"].inc()
            log.info("%s does not encode: %s", entry.key[0], error)
            if isinstance(error, NodeLost) and (limit_s >= max_s or time.monotonic() - began < limit_s):
                self._nodes.breakers.node_failed(entry.key)
            return False
        self._metrics.calls["encoded" if encoded.computed else "cached"].inc()
        return True

    async def _call(self, node: NodeLease, request: EncodeRequest) -> Encoded:
        found: list[Any] = []
        body = with_data(pack(replace(request, media=without_data(request.media))), request.media)
        await self.plain.call(node, "POST /attempts/encode", body, None, None, found.append)
        if len(found) != 1 or not isinstance(found[0], Encoded):
            raise NodeLost(f"{node.node_id} sent an answer of the wrong type")
        return found[0]

    async def _views(
        self, able: Sequence[NodeEntry], node: NodeLease, items: Sequence[MediaItem], root: bytes
    ) -> tuple[list[Encoder], Encoder]:
        """Return the encode nodes and the prompt's own node as placement sees them."""
        able = sorted(able, key=lambda entry: crc32(f"{entry.key[0]} {items[0].hash}".encode()))  # home node first
        names = {entry.lease.node_id: entry.key[1] for entry in able} | {node.node_id: node.epoch}
        size = sum(item.length for item in items) * node.media_row_bytes
        missing = await self._missing(items, root, node, names)
        views = [
            Encoder(
                entry.key, entry.view.waiting_tokens, missing[entry.lease.node_id],
                entry.lease.rates.media_tokens_per_s, size, entry.lease.rates.ship_bytes_per_s,
            )
            for entry in able
        ]  # fmt: skip
        return views, Encoder(node_key(node), 0, missing[node.node_id], node.rates.media_tokens_per_s)

    async def _missing(
        self, items: Sequence[MediaItem], root: bytes, node: NodeLease, names: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many tokens of media each node would have to encode."""
        counts = [blocks_for(item.length * node.media_row_bytes, node.block_bytes) for item in items]
        runs = [embedding_hashes(root, item.hash, count) for item, count in zip(items, counts, strict=True)]
        up = self._nodes.registry_health.up
        held = await asyncio.gather(*(self._prefixes.held(run, names, up) for run in runs))
        lengths = [
            (item.length, {name for name in names if here.get(name, 0) >= len(run)})
            for item, run, here in zip(items, runs, held, strict=True)
        ]
        return {name: sum(length for length, holders in lengths if name not in holders) for name in names}

    def _usable(self, modalities: Collection[str] = (), fingerprint: str = "") -> list[NodeEntry]:
        """Return the encode nodes that can be called now. fingerprint: the one they must have; empty: any."""
        open_breakers = self._nodes.breakers.open().nodes if self._nodes.breakers.any else ()
        return [
            entry
            for entry in self._model.encoders
            if entry.reachable
            and not entry.suspected
            and entry.lease.state == "ready"
            and entry.key not in open_breakers
            and fingerprint in ("", entry.lease.fingerprint)
            and takes(entry.lease, modalities)
        ]
