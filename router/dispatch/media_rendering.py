"""Prompts of chats with media: made by the engine of one node, for all nodes of its fingerprint."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection
from typing import Any

from kvferry.placement.rejections import no_nodes
from kvferry.protocol.errors import InvalidRequest, KvferryError, NodeLost, StepFailed
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.media import RenderedPrompt, RenderRequest
from kvferry.protocol.wire import WireError, pack
from kvferry.router.dispatch.interface import PromptMedia, RenderedMedia
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes, holds, takes
from kvferry.router.nodes.node_entry import NodeEntry, node_key
from kvferry.router.nodes.node_table import NodeTable

log = logging.getLogger(__name__)


class MediaRendering:
    """Makes prompts on one model's nodes. Implements `interface.MediaPrompts`."""

    def __init__(self, model: ModelNodes, nodes: NodeTable, client: NodeClient) -> None:
        self._model, self._nodes, self._client = model, nodes, client

    def check(self, modalities: Collection[str], adapter: str = "") -> None:
        """Raise InvalidRequest if no node takes these media, and NoNodes if none is known at present."""
        leases = [lease for lease in self._model.leases() if holds(lease, adapter)]
        if not leases:
            raise no_nodes(self._model.name.first)
        if not any(takes(lease, modalities) for lease in leases):
            missing = [each for each in modalities if not any(takes(lease, (each,)) for lease in leases)]
            raise InvalidRequest(f"no node of the model takes {' and '.join(missing or modalities)} in a prompt")

    async def render(self, request: RenderRequest, modalities: Collection[str]) -> RenderedMedia:
        """Return a chat's prompt from the least busy node that takes its media, or from one other if that fails.

        Raises the last node's error. Two nodes at most: media that end engines must not end all of them."""
        entries = self._able(request.adapter, modalities)
        if not entries:
            raise no_nodes(self._model.name.first)
        first, *others = (entry.lease for entry in entries)
        try:
            return await self._asked(first, request)
        except KvferryError as error:
            if isinstance(error, NodeLost):
                self._nodes.breakers.node_failed(node_key(first))
            if not error.retryable or not others:
                raise
            log.info("%s makes no prompt: %s", first.node_id, error)
            return await self._asked(others[0], request)

    def _able(self, adapter: str, modalities: Collection[str]) -> list[NodeEntry]:
        """Return the nodes that can make a prompt now, those that are not suspected and have the least work first."""
        breakers = self._nodes.breakers
        shut = breakers.shut().nodes if breakers.any else ()
        able = [
            entry
            for entry in self._model.members
            if entry.reachable
            and entry.lease.state == "ready"
            and holds(entry.lease, adapter)
            and takes(entry.lease, modalities)
        ]
        return sorted(able, key=lambda entry: (entry.key in shut, _work(entry.lease), random.random()))  # noqa: S311

    async def _asked(self, node: NodeLease, request: RenderRequest) -> RenderedMedia:
        found: list[RenderedPrompt] = []

        def answer(message: Any) -> None:
            if not isinstance(message, RenderedPrompt) or not message.sound or found:
                raise WireError(f"a {type(message).__name__} that is invalid as an answer to a RenderRequest")
            found.append(message)

        await self._client.call(node, "POST /attempts/render", pack(request), request.deadline_s, None, answer)
        if not found:
            raise StepFailed(f"{node.node_id} ended its answer without a prompt")
        (prompt,) = found
        return RenderedMedia(prompt.token_ids, PromptMedia(prompt.media, node.fingerprint))


def _work(lease: NodeLease) -> int:
    return lease.load.running_requests + lease.load.waiting_requests
