"""SessionNoter: sends nodes hints about sessions (tools called, session closed), gathered into few calls."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kvferry.placement.types import NodeKey
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.sessions import MAX_NOTES, SessionNotes, tool_group
from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_entry import node_key

GATHER_S = 0.1
"""Time for which notes for a node are gathered, in seconds."""


class SessionNoter:
    """Gathers notes and sends them to nodes with kvferry's own engine; nodes of other engines take none.

    A lost note only causes blocks to be kept for too long or evicted too early."""

    def __init__(self, client: NodeClient, background_calls: BackgroundCalls) -> None:
        self._client, self._background_calls = client, background_calls
        self._open: dict[NodeKey, tuple[NodeLease, list[tuple[str, int]], list[str]]] = {}

    def calls_tools(self, nodes: Sequence[NodeLease], request_id: str, names: Collection[str]) -> None:
        """Queue a note to these nodes that the output of an ended request calls tools of these names."""
        group = tool_group(names)
        for node in nodes:
            self._gathered(node)[0].append((request_id, group))

    def closes(self, model: ModelNodes, session: str) -> None:
        """Queue a note to all nodes of a model that a session is closed."""
        for node in model.leases():
            self._gathered(node)[1].append(session)

    def _gathered(self, node: NodeLease) -> tuple[list[tuple[str, int]], list[str]]:
        if node.engine:
            return [], []
        if (found := self._open.get(node_key(node))) is None:
            found = self._open[node_key(node)] = (node, [], [])
            asyncio.get_running_loop().call_later(GATHER_S, self._send, node)
        return found[1:]

    def _send(self, node: NodeLease) -> None:
        _, tools, closed = self._open.pop(node_key(node))
        for at in range(0, max(len(tools), len(closed)), MAX_NOTES):
            part = tools[at : at + MAX_NOTES]
            ids, groups = tuple(each for each, _ in part), tuple(group for _, group in part)
            notes = SessionNotes(ids, groups, tuple(closed[at : at + MAX_NOTES]))
            self._background_calls.send(self._client.note(node, notes))
