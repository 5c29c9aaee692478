"""ModelAdapters: LoRA adapters that a model's nodes hold, by name, and loading and unloading on all nodes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from kvferry.placement.rejections import no_nodes
from kvferry.protocol.adapters import ChangeAdapter
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.wire import pack
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_table import NodeTable

log = logging.getLogger(__name__)

READING_S = 120.0
"""Longest time a node may take to read an adapter from disk, in seconds."""


class ModelAdapters:
    """Adapters of one model's nodes.

    `ids` maps each name to the adapter id that most members hold under it. Without members it keeps its last value."""

    def __init__(self, model: ModelNodes, nodes: NodeTable, client: NodeClient) -> None:
        self.ids: Mapping[str, str] = {}
        self._model, self._nodes, self._client = model, nodes, client
        nodes.listen(self._update)

    async def change(self, change: ChangeAdapter) -> None:
        """Load or unload an adapter on every node; on return requests can, or no longer can, use it.

        Nodes of other engines load their own adapters; they are used only if the model has no other nodes. If a node
        refuses, the nodes that had newly loaded the adapter unload it, and the node's error is raised. Raises NoNodes
        without nodes."""
        ready = [entry.lease for entry in self._model.members if entry.lease.state == "ready"]
        nodes = [lease for lease in ready if not lease.engine] or ready
        if not nodes:
            raise no_nodes(self._model.name.first)
        held = {node.node_id for node in nodes if any(each.name == change.name for each in node.adapters)}
        answers = await asyncio.gather(*(self._send(node, change) for node in nodes), return_exceptions=True)
        refusals = {node.node_id: error for node, error in zip(nodes, answers, strict=True) if error is not None}
        if refusals and change.path:
            fresh = [node for node in nodes if node.node_id not in refusals.keys() | held]
            undo = ChangeAdapter(change.name)
            await asyncio.gather(*(self._send(node, undo) for node in fresh), return_exceptions=True)
        await self._nodes.refresh()
        for node_id, error in refusals.items():
            log.warning("%s did not change the adapter %s: %s", node_id, change.name, error)
            raise error

    async def _send(self, node: NodeLease, change: ChangeAdapter) -> None:
        await self._client.call(node, "POST /adapters", pack(change), READING_S, None, None)

    def _update(self) -> None:
        if leases := [entry.lease for entry in self._model.members]:
            held = Counter(adapter for lease in leases for adapter in lease.adapters)
            self.ids = {adapter.name: adapter.id for adapter, _ in reversed(held.most_common())}
