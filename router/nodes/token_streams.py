"""The standing token streams: one per decode node, each carrying the output of all this router's requests there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Protocol

from placement.costs import NodeKey
from protocol.errors import KvferryError, NodeLost
from protocol.messages import AttemptFailed, NodeLease, StepFrame, TokenDelta
from router.nodes.client import NodeClient
from router.nodes.table import node_key

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Who listens to one request on a stream. No call may block."""

    def delta(self, delta: TokenDelta) -> None:
        """New tokens, of any attempt of the request."""

    def failed(self, failure: AttemptFailed) -> None:
        """The node gave up an attempt."""

    def lost(self, error: KvferryError) -> None:
        """The stream broke: nothing more will come. The sink is detached."""


class TokenStreams:
    """Keeps a stream open to every decode node it is told of and deals its frames out by request id."""

    def __init__(self, client: NodeClient, *, first_backoff_s: float = 0.05, last_backoff_s: float = 2.0) -> None:
        self._client = client
        self._backoff = (first_backoff_s, last_backoff_s)
        self._streams: dict[NodeKey, _Stream] = {}

    def keep(self, nodes: Iterable[NodeLease]) -> None:
        """Hold streams to exactly these nodes: open the missing ones, close the others."""
        wanted = {node_key(lease): lease for lease in nodes}
        for key in self._streams.keys() - wanted.keys():
            self._streams.pop(key).close(NodeLost(f"{key[0]} left"))
        for key in wanted.keys() - self._streams.keys():
            self._streams[key] = _Stream(wanted[key], self._client, self._backoff)

    def is_open(self, key: NodeKey) -> bool:
        stream = self._streams.get(key)
        return stream is not None and stream.open

    def attach(self, key: NodeKey, request_id: str, sink: Sink) -> None:
        """Listen for a request's output. Raises NodeLost if the stream is not open."""
        if not self.is_open(key):
            raise NodeLost(f"no token stream from {key[0]}")
        self._streams[key].sinks[request_id] = sink

    def detach(self, key: NodeKey, request_id: str) -> None:
        """Stop listening. Harmless when not attached."""
        if stream := self._streams.get(key):
            stream.sinks.pop(request_id, None)

    async def close(self) -> None:
        """Close every stream; the nodes then cancel all that runs for this router."""
        tasks = [stream.task for stream in self._streams.values()]
        self.keep(())
        await asyncio.gather(*tasks, return_exceptions=True)


class _Stream:
    def __init__(self, node: NodeLease, client: NodeClient, backoff: tuple[float, float]) -> None:
        self.open = False
        self.sinks: dict[str, Sink] = {}
        self._node, self._client, self._backoff = node, client, backoff
        self.task = asyncio.create_task(self._run(), name=f"stream-{node.node_id}")

    def close(self, error: KvferryError) -> None:
        self.task.cancel()
        self._break(error)

    async def _run(self) -> None:
        pause, longest = self._backoff
        while True:
            try:
                await self._client.stream(self._node, self._opened, self._frame)
            except KvferryError as error:
                if self.open:
                    level = logging.WARNING if self.sinks else logging.INFO
                    log.log(level, "token stream ended with %d requests on it: %s", len(self.sinks), error)
                    pause = self._backoff[0]
                self._break(error)
            except Exception:
                log.exception("token stream of %s", self._node.node_id)
                self._break(NodeLost(f"{self._node.node_id}: token stream is unreadable"))
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    def _opened(self) -> None:
        self.open = True

    def _frame(self, frame: StepFrame) -> None:
        for delta in frame.deltas:
            if sink := self.sinks.get(delta.request_id):
                sink.delta(delta)
        for failure in frame.failed:
            if sink := self.sinks.get(failure.request_id):
                sink.failed(failure)

    def _break(self, error: KvferryError) -> None:
        self.open = False
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            with contextlib.suppress(KvferryError):
                sink.lost(error)
