"""HTTP client by which a prefill node's adapter offers and hands over prompts to decode nodes' adapters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

from kvferry.protocol.errors import Fenced, KvferryError, NodeDown, NodeLost, TransferFailed, from_body
from kvferry.protocol.handover_messages import Handover, HandoverOffer, HandoverTicket, RoomFirstToken
from kvferry.protocol.messages import DecodeTarget
from kvferry.protocol.wire import FrameReader, WireError, pack
from kvferry.runtime.cluster_secret import HEADER
from kvferry.runtime.http_connection import Connection
from kvferry.runtime.tls import PLAIN, WorkerTls

CONNECT_S, ANSWER_S = 1.0, 10.0
"""Maximum time to connect, and to wait for the answer to an offer, in seconds."""
OFFER_PATH, HANDOVER_PATH = "/attempts/handover/offer", "/attempts/handover"


class HandoverClient:
    """Calls to decode nodes, addressed by the `link_address` of their leases, which is a URL for adapters.

    A call raises NodeDown if the connection breaks, NodeLost if the node does not answer, and the node's own error if
    it refuses. If it is cancelled, its connection is closed. token: returns the cluster's secret."""

    def __init__(self, token: Callable[[], str] = str, tls: WorkerTls = PLAIN) -> None:
        self._token, self._tls = token, tls

    async def offer(self, target: DecodeTarget, offer: HandoverOffer) -> str:
        """Return a ticket for one handover."""
        answer = await self._call(target, OFFER_PATH, offer, ANSWER_S)
        if not isinstance(answer, HandoverTicket):
            raise TransferFailed(f"{target.node_id} answered an offer with a {type(answer).__name__}")
        return answer.ticket

    async def hand_over(self, target: DecodeTarget, handover: Handover, within_s: float) -> RoomFirstToken | None:
        """Hand over a prompt; return once the decode engine has its blocks. For a room, return the first token."""
        try:
            async with asyncio.timeout(within_s):
                answer = await self._call(target, HANDOVER_PATH, handover, None)
                return answer if isinstance(answer, RoomFirstToken) else None
        except TimeoutError as error:
            raise TransferFailed(f"{target.node_id} did not fetch the blocks within {within_s:.3g} s") from error

    async def _call(self, target: DecodeTarget, path: str, message: Any, silence_s: float | None) -> Any:
        answers: list[Any] = []
        try:
            url = urlsplit(target.link_address)
            body, loop = pack(message), asyncio.get_running_loop()
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(FrameReader, refusal),
                    url.hostname or "",
                    url.port or 80,
                    **self._tls.options(url),
                )
        except (OSError, ValueError) as error:
            raise NodeLost(f"{target.node_id}: {type(error).__name__} {error}".strip()) from error
        member = f"{HEADER}: {token}\r\n" if (token := self._token()) else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\n{member}content-type: application/msgpack\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            await connection.exchange((head.encode() + body,), silence_s, None, answers.append)
        except ConnectionError as error:
            raise NodeDown(f"{target.node_id}: {type(error).__name__} {error}".strip()) from error
        except (OSError, httptools.HttpParserError, WireError) as error:
            raise NodeLost(f"{target.node_id}: {type(error).__name__} {error}".strip()) from error
        finally:
            connection.close()
        return answers[0] if answers else None


def refusal(status: int, body: bytes, retry_after: str | None) -> KvferryError:
    """Return the error of a node's refusal. Another process at its address is Fenced."""
    try:
        error = from_body(json.loads(body), f"HTTP status {status}")
    except (ValueError, RecursionError):
        error = KvferryError(f"HTTP status {status}")
    return Fenced(error.message) if status == 404 else error
