"""Connection pool for one Redis or Valkey, or for the master that Sentinels name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import redis.asyncio as redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.exceptions import AuthenticationError, NoPermissionError

log = logging.getLogger("kvferry.redis")

FOLLOW_S = 2.0
"""How often Sentinels are asked who is master, while the one that was serves on: it may have been cut off from them."""

State = dict[str, Any]
"""What a Sentinel tells of a master."""


class Pool(redis.BlockingConnectionPool):
    """Connections that nobody closes but who uses them: closed by others, they break calls that just began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._fresh: WeakSet[Any] = WeakSet()

    def renew(self) -> None:
        """Reconnect all connections when they are next used.

        An error that one connection met would meet the others, each in its own time."""
        self._fresh = WeakSet()

    async def ensure_connection(self, connection: Any) -> None:
        """Called with each connection that somebody is about to use."""
        fresh = self._fresh  # a `renew` while it is made counts for it, too
        if connection not in fresh:
            await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)
        fresh.add(connection)


class SentinelPool(SentinelConnectionPool, Pool):
    """Connections to the master.

    Sentinels are asked for each new one, and every FOLLOW_S while connections are used: what still goes to a former
    master is not used again."""

    def __init__(self, service: str, sentinels: Sentinel, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]
        self._asked_at = time.monotonic()
        self._asking: asyncio.Task[None] | None = None

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        now = time.monotonic()
        if now >= self._asked_at + FOLLOW_S and (self._asking is None or self._asking.done()):
            self._asked_at = now
            self._asking = asyncio.create_task(self._follow(), name="redis-master")
        return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]

    async def get_master_address(self) -> tuple[str, int]:
        """Host and port, asked of the Sentinels now. Raises what `master` does."""
        address = await master(self.sentinel_manager.sentinels, self.service_name)
        if address != self.master_address:
            if self.master_address is not None:
                log.info("Sentinels name another master: %s:%s", *address)
            self.master_address: Any = address
            self.renew()
        return address

    async def aclose(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            with contextlib.suppress(Exception):
                await sentinel.aclose()

    async def _follow(self) -> None:
        with contextlib.suppress(Exception):
            await self.get_master_address()


async def master(sentinels: Iterable[redis.Redis], service: str) -> tuple[str, int]:
    """Host and port of what the Sentinels call the master.

    One that is cut off together with a former master goes on naming it, so all are asked at once, and the answers of
    more than half of them are waited for. Raises MasterNotFoundError, or the error by which a Sentinel refuses us if no
    other knows the master."""
    asking = [asyncio.create_task(_state(each, service)) for each in sentinels]
    states: list[State] = []
    refusal: Exception | None = None
    answers = 0
    try:
        for soonest in asyncio.as_completed(asking):
            state = await soonest
            if isinstance(state, (AuthenticationError, NoPermissionError)):
                refusal = type(state)(f"a Sentinel refuses: {state}")
            if isinstance(state, Exception):
                continue
            answers += 1
            states += [state] if state else []
            if 2 * answers > len(asking) and (found := newest(states)):
                return found
    finally:
        for each in asking:
            each.cancel()
    if found := newest(states):
        return found
    raise refusal or MasterNotFoundError(
        f"Sentinels name no master {service!r} that is up" if answers else "no Sentinel answers"
    )


async def _state(sentinel: redis.Redis, service: str) -> State | Exception | None:
    """None: it knows no such service. An error is the answer, too, for nobody may be waiting for it any more."""
    try:
        masters: Any = await sentinel.sentinel_masters()
        return masters.get(service)  # type: ignore[no-any-return]
    except Exception as error:
        return error


def newest(states: Iterable[State]) -> tuple[str, int] | None:
    """Host and port of the master that was made last, if one of those who know it has it up.

    While a failover is under way, who leads it tells the old master's address with the new one's epoch."""
    states = list(states)
    last = max((state["config-epoch"] for state in states), default=0)
    up = [
        state
        for state in states
        if state["config-epoch"] == last and state["is_master"] and not state["is_sdown"] and not state["is_odown"]
    ]
    up.sort(key=lambda state: "failover_in_progress" in state["flags"])
    return (up[0]["ip"], up[0]["port"]) if up else None
