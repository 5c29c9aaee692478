"""HTTP to the nodes. The one place of the router that knows httpx; its errors become ours here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import httpx

from protocol.errors import NodeLost
from protocol.messages import CancelRequest, GenerateRequest, NodeLease, PrefillRequest, StepFrame
from protocol.wire import FrameReader, pack
from router.nodes.frame_stream import read_frames
from router.nodes.refusals import refusal
from router.nodes.transport import CancelSafeTransport

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the nodes' server does it (5 s), so that none is used as it closes."""

UNREACHABLE = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, httptools.HttpParserError, OSError)
"""What a node that cannot be reached, or no longer, looks like. OSError includes TimeoutError."""


class NodeClient:
    """Calls to nodes by lease. Every call raises NodeLost when the node cannot be reached or stops answering, and the
    node's own KvferryError when it refuses. `transport` replaces the network in tests."""

    def __init__(
        self,
        router_id: str,
        *,
        connect_s: float = 2.0,
        answer_s: float = 10.0,
        silence_s: float = 3.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.router_id = router_id
        self._connect_s, self._silence_s = connect_s, silence_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S)
        self._http = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(answer_s, connect=connect_s, pool=None),
            headers={"content-type": "application/msgpack"},
            transport=transport or CancelSafeTransport(httpx.AsyncHTTPTransport(limits=limits, trust_env=False)),
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def prefill(self, node: NodeLease, request: PrefillRequest, deliver: Callable[[Any], None]) -> None:
        """Send the attempt and deliver the messages of its answer as they come; returns when the answer ends. It may
        stay silent while the request waits in the node's queue, so there is no read timeout here."""
        timeout = httpx.Timeout(None, connect=self._connect_s)
        with _translated(node):
            async with self._http.stream(
                "POST", f"{node.http_url}/attempts/prefill", content=pack(request), timeout=timeout
            ) as response:
                await _check(response)
                reader = FrameReader()
                async for data in response.aiter_raw():
                    for message in reader.feed(data):
                        deliver(message)

    async def generate(self, node: NodeLease, request: GenerateRequest) -> None:
        await self._post(node, "/attempts/generate", request)

    async def cancel(self, node: NodeLease, request: CancelRequest) -> None:
        await self._post(node, "/attempts/cancel", request)

    async def stream(self, node: NodeLease, opened: Callable[[], None], deliver: Callable[[StepFrame], None]) -> None:
        """Read the node's token stream for this router: `opened` once it is accepted, `deliver` for every frame. Ends
        only with an error: NodeLost when it breaks or stays silent for `silence_s` (heartbeats come every 0.5 s)."""
        with _translated(node):
            await read_frames(
                f"{node.http_url}/streams/{self.router_id}",
                connect_s=self._connect_s,
                silence_s=self._silence_s,
                opened=opened,
                deliver=deliver,
            )
        raise NodeLost(f"{node.node_id} closed the token stream")

    async def _post(self, node: NodeLease, path: str, request: Any) -> None:
        with _translated(node):
            response = await self._http.post(f"{node.http_url}{path}", content=pack(request))
            await _check(response)


async def _check(response: httpx.Response) -> None:
    if response.status_code >= 400:
        raise refusal(response.status_code, response.headers, await response.aread())


@contextlib.contextmanager
def _translated(node: NodeLease) -> Iterator[None]:
    try:
        yield
    except UNREACHABLE as error:
        raise NodeLost(f"{node.node_id}: {type(error).__name__} {error}".strip()) from error
