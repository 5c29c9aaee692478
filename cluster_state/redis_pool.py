"""Connection pools of the Redis client: for one server, and for the master that Sentinels name."""

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

QUERY_S = 2.0
"""Seconds between queries of the Sentinels while the known master still answers.

The known master may be a former one, partitioned from the Sentinels."""

State = dict[str, Any]
"""State of a master as a Sentinel reports it."""


class Pool(redis.BlockingConnectionPool):
    """Connection pool that closes a connection only when its next user takes it.

    Closing it from elsewhere would break calls that just began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._fresh: WeakSet[Any] = WeakSet()

    def renew(self) -> None:
        """Reconnect all connections when they are next used.

        The cause of one connection's error would otherwise break the other connections one by one."""
        self._fresh = WeakSet()

    def is_fresh(self, connection: Any) -> bool:
        """Return whether the connection was made since the last `renew`."""
        return connection in self._fresh

    async def ensure_connection(self, connection: Any) -> None:
        """Prepare a connection for use. The pool calls it with each connection before a call uses it."""
        fresh = self._fresh  # a `renew` during the connect must also apply to this connection
        if connection not in fresh:
            await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)
        fresh.add(connection)


class SentinelPool(SentinelConnectionPool, Pool):
    """Connections to the master.

    Sentinels are queried for each new connection, and every QUERY_S while connections are used. Connections to a former
    master are not used again."""

    def __init__(self, service: str, sentinels: Sentinel, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]
        self._queried_at = time.monotonic()
        self._query: asyncio.Task[None] | None = None

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """Return a connection to the master; start querying the Sentinels if QUERY_S has passed."""
        now = time.monotonic()
        if now >= self._queried_at + QUERY_S and (self._query is None or self._query.done()):
            self._queried_at = now
            self._query = asyncio.create_task(self._query_sentinels(), name="redis-master")
        return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]

    async def get_master_address(self) -> tuple[str, int]:
        """Ask the Sentinels for the master's host and port. Raises what `master` raises."""
        address = await master(self.sentinel_manager.sentinels, self.service_name)
        if address != self.master_address:
            if self.master_address is not None:
                log.info("Sentinels announce another master: %s:%s", *address)
            self.master_address: Any = address
            self.renew()
        return address

    async def aclose(self) -> None:
        """Close the connections to the master and the Sentinels."""
        if self._query is not None:
            self._query.cancel()
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            with contextlib.suppress(Exception):
                await sentinel.aclose()

    async def _query_sentinels(self) -> None:
        with contextlib.suppress(Exception):
            await self.get_master_address()


async def master(sentinels: Iterable[redis.Redis], service: str) -> tuple[str, int]:
    """Return host and port of the master that the Sentinels name.

    A Sentinel that is partitioned together with a former master keeps naming it. So all are queried at once, and more
    than half of them must answer, or all that can. Raises MasterNotFoundError, or a Sentinel's refusal if no other
    knows the master."""
    queries = [asyncio.create_task(_state(each, service)) for each in sentinels]
    states: list[State] = []
    refusal: Exception | None = None
    answers = 0
    try:
        for soonest in asyncio.as_completed(queries):
            state = await soonest
            if isinstance(state, (AuthenticationError, NoPermissionError)):
                refusal = type(state)(f"a Sentinel refuses: {state}")
            if isinstance(state, Exception):
                continue
            answers += 1
            states += [state] if state else []
            if 2 * answers > len(queries) and (found := newest(states)):
                return found
    finally:
        for each in queries:
            each.cancel()
    if found := newest(states):
        return found
    raise refusal or MasterNotFoundError(
        f"Sentinels know no master {service!r} that is up" if answers else "no Sentinel answers"
    )


async def _state(sentinel: redis.Redis, service: str) -> State | Exception | None:
    """Return the Sentinel's state of the service; None if it does not know it, and the error if the call fails.

    Errors are returned, not raised, because the task may be abandoned."""
    try:
        masters: Any = await sentinel.sentinel_masters()
        return masters.get(service)  # type: ignore[no-any-return]
    except Exception as error:
        return error


def newest(states: Iterable[State]) -> tuple[str, int] | None:
    """Return host and port of the master with the newest epoch, if a Sentinel that knows it reports it up.

    While a failover runs, its leader reports the old master's address with the new epoch; that state is used last."""
    states = list(states)
    last = max((state["config-epoch"] for state in states), default=0)
    up = [
        state
        for state in states
        if state["config-epoch"] == last and state["is_master"] and not state["is_sdown"] and not state["is_odown"]
    ]
    up.sort(key=lambda state: "failover_in_progress" in state["flags"])
    return (up[0]["ip"], up[0]["port"]) if up else None
