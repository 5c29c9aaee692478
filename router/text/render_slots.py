"""RenderSlots: fast and slow places for renderings of a model's prompts in child processes, fair over tenants.

A rendering begins in one of FAST_PLACES and leaves it after SLOW_AFTER_S, so that short ones never wait for a long
one. Tenants take turns. A tenant whose rendering is slow gets no other place until it ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.protocol.errors import Overloaded

FAST_PLACES = 2
"""Number of renderings at once in their first SLOW_AFTER_S."""
SLOW_PLACES = 2
"""Number of renderings at once beyond their first SLOW_AFTER_S."""
SLOW_AFTER_S = 0.1
"""Time after which a rendering is slow, in seconds."""
WAIT_S = 10.0
"""Longest wait for a place, in seconds."""
MAX_WAITING = 256
"""Maximum number of waiting renderings of one tenant."""
MAX_WAITING_BYTES = 64 * 2**20
"""Maximum bytes of waiting variables; a tenant takes at most half of the bytes left, or a single rendering."""


@dataclass(slots=True, eq=False)
class _Tenant:
    waiting: deque[Place] = field(default_factory=deque)
    bytes: int = 0
    running: int = 0
    slow: int = 0


@dataclass(slots=True, eq=False)
class Place:
    """A rendering's place, or its wait for one."""

    tenant: _Tenant
    size: int
    turn: asyncio.Future[None]
    slow: bool = False


class RenderSlots:
    """Places of one model."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._fast = self._slow = self._bytes = 0

    async def enter(self, name: str, size: int) -> Place:
        """Wait for a place for variables of `size` bytes; the caller must call `leave`. Raises Overloaded."""
        tenant = self._tenants.setdefault(name, _Tenant())
        waiting = len(tenant.waiting)
        if waiting >= MAX_WAITING or (waiting and tenant.bytes + size > MAX_WAITING_BYTES - self._bytes):
            raise Overloaded(f"{waiting} prompts are waiting to be rendered; retry in a second", retry_after=1)
        place = Place(tenant, size, asyncio.get_running_loop().create_future())
        tenant.waiting.append(place)
        self._count(tenant, size)
        self._next()
        try:
            async with asyncio.timeout(WAIT_S):
                await place.turn
        except BaseException as error:
            self._give_up(place)
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(f"the prompt waited {WAIT_S:.0f} s to be rendered; retry later", retry_after=1) from None
        return place

    def move_to_slow(self, place: Place) -> bool:
        """Move a rendering from the fast to the slow places; return false if none is free."""
        if self._slow >= SLOW_PLACES:
            return False
        place.slow = True
        self._slow += 1
        self._fast -= 1
        place.tenant.slow += 1
        self._next()
        return True

    def leave(self, place: Place) -> None:
        """Free a place."""
        place.tenant.running -= 1
        if place.slow:
            self._slow -= 1
            place.tenant.slow -= 1
        else:
            self._fast -= 1
        self._next()

    def _count(self, tenant: _Tenant, size: int) -> None:
        tenant.bytes += size
        self._bytes += size

    def _give_up(self, place: Place) -> None:
        if place in place.tenant.waiting:
            place.tenant.waiting.remove(place)
            self._count(place.tenant, -place.size)
            self._next()
        elif not place.turn.cancelled():  # it got its place at the same moment
            self.leave(place)

    def _next(self) -> None:
        """Give the free places to tenants in turn, and forget tenants without renderings."""
        for name in [name for name, each in self._tenants.items() if not each.waiting and not each.running]:
            del self._tenants[name]
        while self._fast < FAST_PLACES:
            chosen = next((name for name, each in self._tenants.items() if each.waiting and not each.slow), None)
            if chosen is None:
                return
            self._tenants.move_to_end(chosen)
            tenant = self._tenants[chosen]
            place = tenant.waiting.popleft()
            self._count(tenant, -place.size)
            if not place.turn.done():
                tenant.running += 1
                self._fast += 1
                place.turn.set_result(None)
