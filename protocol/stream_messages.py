"""`FrameAck`: message by which a router acknowledges the frames of a node's token stream."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(45, checked=True)
@dataclass(frozen=True, slots=True)
class FrameAck:
    """Router → node, `POST /streams/{router_id}/seen`, every second: frames up to `number` have arrived.

    A router that stops sending it counts as frozen."""

    number: int
