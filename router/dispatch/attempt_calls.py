"""Protocol of the node calls that attempts make (prefill, generate, drop, move); see NodeClient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import CancelRequest, GenerateRequest, MoveRequest, PrefillRequest


class AttemptCalls(Protocol):
    """Calls of nodes that attempts make; see `NodeClient`."""

    async def prefill(self, node: NodeLease, request: PrefillRequest, deliver: Callable[[Any], None]) -> None: ...

    async def generate(self, node: NodeLease, request: GenerateRequest) -> None: ...

    async def drop(self, node: NodeLease, request: CancelRequest) -> None: ...

    async def move(self, node: NodeLease, request: MoveRequest) -> None: ...
