"""NodeClient: HTTP client for all calls from the router to nodes, with pooled connections and translated errors.

Every token of every request passes through it, so it has no task, queue or timeout per chunk between the socket and
the callback. A cancelled call closes its connection at any point of the exchange."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import httptools

from kvferry.protocol.errors import KvferryError, NodeDown, NodeLost
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.media import with_data, without_data
from kvferry.protocol.messages import CancelRequest, GenerateRequest, MoveRequest, PrefillRequest, StepFrame
from kvferry.protocol.sessions import SessionNotes
from kvferry.protocol.stream_messages import FrameAck
from kvferry.protocol.wire import FrameReader, WireError, pack
from kvferry.router.nodes.message_validation import check_answer, check_frame, refusal_of
from kvferry.runtime.cluster_secret import HEADER
from kvferry.runtime.http_connection import Callback, Connection
from kvferry.runtime.tls import PLAIN, WorkerTls

MAX_IDLE = 64
"""Maximum number of idle connections kept per node."""

Address = tuple[str, int]
"""Host and port of a node."""


class NodeClient:
    """Calls to nodes, each addressed by its lease.

    Every call raises NodeLost if the node is unreachable, silent for too long or sends invalid data, NodeDown if the
    connection breaks, and the node's own KvferryError if it refuses.

    token      returns the cluster's secret for each call, or an empty string
    tls        options of connections to nodes whose address begins with https
    silence_s  longest silence of a token stream, in seconds
    clock      seconds for silence limits; it stops while this process is suspended
    """

    def __init__(
        self,
        router_id: str,
        token: Callable[[], str] = str,
        tls: WorkerTls = PLAIN,
        *,
        connect_s: float = 1.0,
        answer_s: float = 10.0,
        silence_s: float = 0.8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router_id, self.silence_s, self.clock = router_id, silence_s, clock
        self._token, self._tls = token, tls
        self._connect_s, self._answer_s = connect_s, answer_s
        self._idle: dict[Address, list[Connection]] = {}

    async def aclose(self) -> None:
        """Close the idle connections; no call may be in flight."""
        for address in tuple(self._idle):
            self._forget(address)

    async def prefill(self, node: NodeLease, request: PrefillRequest, deliver: Callable[[Any], None]) -> None:
        """Send the attempt, deliver the messages of its answer as they arrive, and return when the answer ends.

        No silence limit applies, since the answer is silent while the request waits in the node's queue."""

        def answer(message: Any) -> None:
            deliver(check_answer(message))

        await self.call(node, "POST /attempts/prefill", _with_media(request), None, None, answer)

    async def generate(self, node: NodeLease, request: GenerateRequest) -> None:
        """Send an attempt to a decode node; its tokens arrive on the token stream."""
        await self.call(node, "POST /attempts/generate", _with_media(request), self._answer_s, None, None)

    async def cancel(self, node: NodeLease, request: CancelRequest) -> None:
        """Cancel an attempt on a node."""
        await self.call(node, "POST /attempts/cancel", pack(request), self._answer_s, None, None)

    async def drop(self, node: NodeLease, request: CancelRequest) -> None:
        """Cancel an attempt and ignore errors, with one retry; an unreachable node drops it with the broken stream."""
        for _ in range(2):
            with contextlib.suppress(KvferryError):
                await self.cancel(node, request)
                return

    async def note(self, node: NodeLease, notes: SessionNotes) -> None:
        """Send a node notes about sessions, and ignore errors."""
        with contextlib.suppress(KvferryError):
            await self.call(node, "POST /sessions", pack(notes), self._answer_s, None, None)

    async def move(self, node: NodeLease, request: MoveRequest) -> None:
        """Ask a node to move a stream; return once the new node has received its blocks and continues it.

        Raises NodeLost if the connection broke and the outcome is unknown. After any other error the stream stays."""
        await self.call(node, "POST /attempts/move", pack(request), None, None, None)

    async def stream(
        self, node: NodeLease, after: int | None, opened: Callable[[], None], deliver: Callable[[StepFrame], None]
    ) -> None:
        """Read the node's token stream for this router, resuming after frame `after` or from the start.

        Calls `opened` once the node accepts, then `deliver` for every frame. Ends only with an error: NodeLost if the
        stream breaks or is silent for `silence_s` (heartbeats are more frequent), StreamLost if the node no longer has
        the frames after `after`."""

        def step(frame: Any) -> None:
            deliver(check_frame(frame))

        behind = "" if after is None else f"&after={after}"
        path = f"/streams/{self.router_id}?epoch={node.epoch}{behind}"
        await self.call(node, f"GET {path}", b"", self.silence_s, opened, step)
        raise NodeLost(f"{node.node_id} closed the token stream")

    async def seen(self, node: NodeLease, number: int) -> None:
        """Acknowledge the stream's frames up to `number`."""
        await self.call(
            node, f"POST /streams/{self.router_id}/seen", pack(FrameAck(number)), self._answer_s, None, None
        )

    async def call(
        self,
        node: NodeLease,
        what: str,
        body: bytes | list[bytes],
        silence_s: float | None,
        opened: Callback,
        deliver: Callback,
    ) -> None:
        """Call a node; `what` is the method and path. A long body comes in pieces, which are not copied."""
        method, _, path = what.partition(" ")
        first, *rest = [body] if isinstance(body, bytes) else body
        length = len(first) + sum(map(len, rest))
        try:
            address, prefix, host = _address(node.http_url)
            head = f"{method} {prefix}{path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n"
            connection = self._idle_connection(address)
            if connection is None:
                loop, encrypted = asyncio.get_running_loop(), self._tls.options(urlsplit(node.http_url))
                await asyncio.sleep(0)  # the first step may run without a task
                async with asyncio.timeout(self._connect_s):
                    _, connection = await loop.create_connection(self._connection, *address, **encrypted)
        except (OSError, ValueError) as error:
            raise _node_lost(node, error) from error
        member = f"{HEADER}: {token}\r\n" if (token := self._token()) else ""
        request = f"{head}{member}content-type: application/msgpack\r\n\r\n".encode() + first
        try:
            await connection.exchange((request, *rest), silence_s, opened, deliver)
        except (OSError, httptools.HttpParserError, WireError) as error:
            self._forget(address)
            raise _node_lost(node, error, NodeDown if isinstance(error, ConnectionError) else NodeLost) from error
        self._keep_idle(address, connection)

    def _connection(self) -> Connection:
        return Connection(FrameReader, refusal_of, self.clock)

    def _idle_connection(self, address: Address) -> Connection | None:
        while idle := self._idle.get(address):
            if (connection := idle[-1]).wake():
                return connection
        return None

    def _forget(self, address: Address) -> None:
        """Close all idle connections of a node after one broke, so that the next call opens a new one."""
        for connection in list(self._idle.get(address, ())):
            connection.close()

    def _keep_idle(self, address: Address, connection: Connection) -> None:
        idle = self._idle.setdefault(address, [])

        def closed() -> None:
            idle.remove(connection)
            if not idle:
                self._idle.pop(address, None)

        idle.append(connection)
        connection.rest(closed)
        if len(idle) > MAX_IDLE:
            idle[0].close()


@lru_cache(maxsize=4096)
def _address(http_url: str) -> tuple[Address, str, str]:
    """Return a node's address, and the path and the host of its URL. Raises ValueError."""
    url = urlsplit(http_url)
    return (url.hostname or "", url.port or 80), url.path, url.netloc


def _with_media(request: GenerateRequest | PrefillRequest) -> bytes | list[bytes]:
    """Return a packed message, followed by the data of its job's media if it has any."""
    if not (media := request.job.media):
        return pack(request)
    return with_data(pack(replace(request, job=replace(request.job, media=without_data(media)))), media)


def _node_lost(node: NodeLease, error: Exception, kind: type[NodeLost] = NodeLost) -> NodeLost:
    return kind(f"{node.node_id}: {type(error).__name__} {error}".strip())
