"""Lua scripts on the path of requests, called over a dedicated Redis connection at a lower cost than the client's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kvferry.cluster_state.redis_client import Script
from kvferry.cluster_state.script_connection import ScriptConnection, packed


class DirectScript(Script):
    """Script whose usual call costs less than a call of the client.

    The client takes a connection from its pool for each command, checks it, and times each step; here one dedicated
    connection carries all calls. The caller sets the time limit. After a broken connection or an error of the server,
    such as an unknown script, the client makes the call, since it handles all errors."""

    def __init__(self, client: redis.Redis, text: str, timeout_s: float) -> None:
        super().__init__(client, text, timeout_s)
        self._pool: Any = client.connection_pool
        self._connection: ScriptConnection | None = None
        self._closed: list[ScriptConnection] = []

    def call(self, keys: Sequence[str], args: Sequence[bytes]) -> asyncio.Future[Any] | None:
        """Send a call on the dedicated connection; return the future answer, or None: use `run` instead.

        The future may raise ResponseError or RedisConnectionError; the caller may then use `run`."""
        connection = self._connection
        if connection is None:
            return None
        if not connection.is_usable or not self._pool.is_fresh(connection.client_connection):
            self._drop(connection)
            return None
        head = (b"EVALSHA", self._script.sha.encode(), b"%d" % len(keys))
        return connection.call(packed((*head, *(key.encode() for key in keys), *args)))

    async def _call(self, keys: list[str], args: list[Any]) -> Any:
        given = [each if isinstance(each, bytes) else str(each).encode() for each in args]
        try:
            answer = self.call(keys, given)
            if answer is None:
                await self._open()
                answer = self.call(keys, given)
            if answer is not None:
                return await answer
        except (RedisConnectionError, ResponseError):
            pass
        return await super()._call(keys, args)

    async def _open(self) -> None:
        """Take a connection from the client's pool, and return closed ones to it."""
        while self._closed:
            closed = self._closed.pop().client_connection
            await closed.disconnect(nowait=True)
            await self._pool.release(closed)
        connection = await self._pool.get_connection()
        if self._connection is None:
            self._connection = ScriptConnection(connection)
        else:  # another call has opened one meanwhile
            await self._pool.release(connection)

    def _drop(self, connection: ScriptConnection) -> None:
        connection.close()
        self._connection = None
        self._closed.append(connection)
