"""What an attempt tells its journey, and where it waits to be read."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.messages import TokenDelta
from router.journey.blame import Failure

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Drains:
    """The node where an attempt streams takes nothing new, and will end."""

    attempt: int


Event = TokenDelta | Failure | Drains


class Mail(Generic[T]):
    """What is told to one reader, in order; empty, it is false. An asyncio.Queue costs four times as much, and every
    token passes here."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> T:
        """The oldest, once there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()
