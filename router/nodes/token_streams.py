"""The standing token streams: one per decode node, each carrying the output of all this router's requests there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from placement.terms import NodeKey
from protocol.errors import KvferryError, NodeLost
from router.nodes.client import NodeClient
from router.nodes.entry import NodeEntry

log = logging.getLogger(__name__)


class TokenStreams:
    """Keeps a stream open to every decode node it is told of and hands its frames to the node's entry."""

    def __init__(self, client: NodeClient, *, first_backoff_s: float = 0.05, last_backoff_s: float = 2.0) -> None:
        self._client = client
        self._backoff = (first_backoff_s, last_backoff_s)
        self._streams: dict[NodeKey, tuple[NodeEntry, asyncio.Task[None]]] = {}

    def keep(self, nodes: Iterable[NodeEntry]) -> None:
        """Hold streams to exactly these nodes: open the missing ones, close the others."""
        wanted = {entry.key: entry for entry in nodes}
        for key in self._streams.keys() - wanted.keys():
            entry, task = self._streams.pop(key)
            task.cancel()
            entry.broken(NodeLost(f"{key[0]} left"))
        for key in wanted.keys() - self._streams.keys():
            task = asyncio.create_task(self._read(wanted[key]), name=f"stream-{key[0]}")
            self._streams[key] = (wanted[key], task)

    async def close(self) -> None:
        """Close every stream; the nodes then cancel all that runs for this router."""
        tasks = [task for _, task in self._streams.values()]
        self.keep(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, entry: NodeEntry) -> None:
        pause, longest = self._backoff
        while True:
            try:
                await self._client.stream(entry.lease, entry.opened, entry.deal)
            except KvferryError as error:
                if entry.open:
                    level = logging.WARNING if entry.listeners else logging.INFO
                    log.log(level, "token stream ended with %d requests on it: %s", len(entry.listeners), error)
                    pause = self._backoff[0]
                entry.broken(error)
            except Exception:
                log.exception("token stream of %s", entry.key[0])
                entry.broken(NodeLost(f"{entry.key[0]}: token stream is unreadable"))
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)
