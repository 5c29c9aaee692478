"""Scripts that requests wait for, called on connections that are kept."""

from __future__ import annotations

from math import inf
from typing import Any

import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kvferry.cluster_state.redis_client import Script

MOST_KEPT = 4
"""Most connections that a script keeps of its client's pool."""


class DirectScript(Script):
    """A script whose usual call costs half of the client's.

    The client takes a connection from its pool for each command, checks it, and times each step; here a connection
    stays. The caller bounds the call. After a broken connection or an error of the server, such as an unknown script,
    the client makes the call: it knows all troubles."""

    def __init__(self, client: redis.Redis, text: str, timeout_s: float) -> None:
        super().__init__(client, text, timeout_s)
        self._pool: Any = client.connection_pool
        self._kept: list[Any] = []

    async def _call(self, keys: list[str], args: list[Any]) -> Any:
        try:
            return await self._directly(keys, args)
        except (RedisConnectionError, ResponseError):
            return await super()._call(keys, args)

    async def _directly(self, keys: list[str], args: list[Any]) -> Any:
        connection = await self._taken()
        is_sound = False
        try:
            command = connection.pack_command("EVALSHA", self._script.sha, len(keys), *keys, *args)
            await connection.send_packed_command(command, check_health=False)
            answer = await connection.read_response(timeout=inf)
            is_sound = len(self._kept) < MOST_KEPT
            return answer
        finally:
            if is_sound:
                self._kept.append(connection)
            else:
                await self._pool.release(connection)

    async def _taken(self) -> Any:
        """Return a kept connection, or one of the pool's."""
        while self._kept:
            connection = self._kept.pop()
            if connection.is_connected and self._pool.is_fresh(connection):
                return connection
            await self._pool.release(connection)
        return await self._pool.get_connection()
