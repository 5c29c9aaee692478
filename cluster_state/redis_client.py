"""A client of Redis or Valkey with deadlines, whose errors are RegistryUnavailable."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from protocol.errors import ConfigError, RegistryUnavailable

log = logging.getLogger("kvferry.redis")

_MAX_CONNECTIONS = 16


def connected(url: str, timeout_s: float) -> redis.Redis:
    """Connects on first use, reconnects by itself; `timeout_s` bounds connecting and every answer. Raises ConfigError
    for a URL that the redis package cannot read."""
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # One more try: a pooled connection may belong to a server that has restarted since.
            retry=Retry(NoBackoff(), 1, (RedisConnectionError,)),
        )
    except ValueError as error:
        raise ConfigError(f"redis_url cannot be read: {error}", param="redis_url") from error
    return redis.Redis(connection_pool=pool)


async def close(client: redis.Redis) -> None:
    """Close all connections. Never raises."""
    try:
        await client.aclose()
        await client.connection_pool.disconnect()
    except (RedisError, OSError) as error:
        log.debug("closing: %s", error)


async def run(script: Any, keys: list[str], args: list[Any]) -> Any:
    """The answer of a registered script."""
    return await translated(script(keys=keys, args=args))


async def translated(answer: Awaitable[Any]) -> Any:
    """Await an answer of the client; its errors become RegistryUnavailable."""
    try:
        return await answer
    except (RedisError, OSError) as error:
        raise RegistryUnavailable(f"Redis: {error or type(error).__name__}") from error
