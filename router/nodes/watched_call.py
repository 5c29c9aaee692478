"""Call of a node to encode or render media, which fails as soon as the node is lost or suspected of hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry.protocol.errors import NodeLost
from kvferry.router.nodes.node_entry import NodeEntry, ignored

T = TypeVar("T")


async def watched(
    entry: NodeEntry, call: Coroutine[Any, Any, T], limit_s: float, tokens: int = 0, *, ignore_suspicion: bool = False
) -> T:
    """Return the result of a call, for which `tokens` are reserved on the node until it ends.

    Raises what the call raises, and NodeLost if the node is lost, if it is suspected of hanging (unless
    `ignore_suspicion`), or after limit_s seconds."""
    lost: asyncio.Future[NodeLost] = asyncio.get_running_loop().create_future()

    def give_up(error: NodeLost | None = None) -> None:
        if not lost.done():
            lost.set_result(error or NodeLost(f"{entry.key[0]} may hang"))

    reservation = entry.reserve(tokens, 0, give_up, ignored if ignore_suspicion else give_up)
    task = asyncio.ensure_future(call)
    either: set[asyncio.Future[Any]] = {task, lost}
    try:
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise lost.result() if lost.done() else NodeLost(f"{entry.key[0]} takes longer than {limit_s:.3g} s")
    finally:
        reservation.release()
        task.cancel()
