"""Redis client with deadlines and Sentinels, and runner of Lua scripts; errors become RegistryUnavailable.

After a connection fails, all other connections are re-established before their next use: the name is resolved, the
password read and the Sentinels queried again. Retries are up to the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from kvferry.cluster_state import redis_url
from kvferry.cluster_state.name_lookups import NamedConnection, NamedTlsConnection, NameLookups
from kvferry.cluster_state.redis_pool import Pool, SentinelPool
from kvferry.protocol.errors import ConfigError, RegistryFull, RegistryRefuses, RegistryUnavailable, reason
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.redis")
_unexpected = RateLimitedLog(log)

_MAX_CONNECTIONS = 16
CALL_TIMEOUTS = 3
"""Maximum time of a call, in multiples of an answer's timeout: it may wait for a connection, connect and retry once."""
CLUSTER_MODE = "it runs in Cluster mode, which is not supported: use a single server, or one behind Sentinels"


class PasswordFile(CredentialProvider):
    """Credentials from a file that is read for each connection, so that a changed password takes effect."""

    def __init__(self, user: str, path: str) -> None:
        self._user, self._path = user, Path(path).expanduser()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return (user, password), or (password,) without a user. Raises RedisConnectionError for a file error."""
        try:
            password = self._path.read_text().strip()
        except (OSError, ValueError) as error:
            raise RedisConnectionError(f"its password file {self._path} cannot be read: {reason(error)}") from error
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the credentials; read the file on a thread."""
        return await asyncio.to_thread(self.get_credentials)


def connected(url: str, timeout_s: float, password_file: str = "") -> redis.Redis:
    """Return a client that connects on first use and reconnects by itself.

    timeout_s bounds connecting and every answer. Raises ConfigError for an invalid URL or an unreadable file."""
    return _client(redis_url.read(url), timeout_s, password_file)


def connected_without_credentials(url: str, timeout_s: float) -> redis.Redis:
    """Return a client like `connected` does, but one that sends neither user, password nor certificate."""
    return _client(redis_url.without_credentials(redis_url.read(url)), timeout_s, "")


def _client(where: redis_url.RedisUrl, timeout_s: float, password_file: str) -> redis.Redis:
    options: dict[str, Any] = where.server | _deadlines(timeout_s)
    options |= {"max_connections": _MAX_CONNECTIONS, "timeout": timeout_s}
    # One retry: a pooled connection may belong to a server that has restarted since.
    options["retry"] = Retry(NoBackoff(), 1, (RedisConnectionError,))
    if password_file:
        options["credential_provider"] = _file_credentials(where, options, password_file)
    if where.sentinels:
        sentinel_options = (
            where.sentinel | _deadlines(timeout_s / 2) | {"ssl": where.tls, "retry": Retry(NoBackoff(), 0)}
        )
        sentinels = Sentinel(where.sentinels, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
        return redis.Redis(connection_pool=SentinelPool(where.service, sentinels, ssl=where.tls, **options))
    if "path" in options:
        del options["socket_keepalive"]
        return redis.Redis(connection_pool=Pool(connection_class=redis.UnixDomainSocketConnection, **options))
    kind = NamedTlsConnection if where.tls else NamedConnection
    return redis.Redis(connection_pool=Pool(connection_class=kind, lookups=NameLookups(), **options))


def _deadlines(timeout_s: float) -> dict[str, Any]:
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "socket_keepalive": True}


def _file_credentials(where: redis_url.RedisUrl, options: dict[str, Any], path: str) -> PasswordFile:
    """Return the credentials from the file, and remove user and password from the options."""
    if options.pop("password", ""):
        raise ConfigError(f"redis_url {where.shown} already has a password", param="redis_password_file")
    provider = PasswordFile(options.pop("username", ""), path)
    try:
        provider.get_credentials()
    except RedisConnectionError as error:
        raise ConfigError(f"Redis: {error}", param="redis_password_file") from error
    return provider


async def close(client: redis.Redis) -> None:
    """Close all connections. Never raises."""
    for closing in (client.aclose, client.connection_pool.disconnect, client.connection_pool.aclose):
        try:
            await closing()
        except Exception as error:
            log.debug("closing: %s", error)


class Script:
    """A Lua script of `redis_scripts`.

    Servers before Redis 7 reject the flags in a script's first line. There the script runs without that line, and thus
    without the permissions of the flags."""

    def __init__(self, client: redis.Redis, text: str, timeout_s: float) -> None:
        self._client, self._limit_s = client, CALL_TIMEOUTS * timeout_s
        self._script, self._text = client.register_script(text), text

    async def run(self, keys: list[str], args: list[Any]) -> Any:
        """Run the script and return its answer. Raises RegistryUnavailable."""
        return await answered(self._client, self._call(keys, args), self._limit_s)

    async def _call(self, keys: list[str], args: list[Any]) -> Any:
        try:
            return await self._script(keys=keys, args=args)
        except ResponseError as error:
            if "can't run this command" in str(error):
                raise NoPermissionError(f"{error} {self._line(error)}") from error
            if not self._text.startswith("#!") or "compiling script" not in str(error):
                raise
            self._text = self._text.partition("\n")[2]
            self._script = self._client.register_script(self._text)
            return await self._script(keys=keys, args=args)

    def _line(self, error: ResponseError) -> str:
        """Return the script's line that caused an error, since Redis before 7.2 does not name the command."""
        number = re.search(r"user_script:(\d+)", str(error))
        return "".join(self._text.splitlines()[int(number[1]) - 1 :][:1]).strip() if number else ""


async def answered(client: redis.Redis, answer: Awaitable[Any], limit_s: float) -> Any:
    """Await an answer of the client; convert its errors to RegistryUnavailable.

    Raises RegistryFull if the server is out of memory, RegistryRefuses if it rejects the password or forbids the
    command. Raises CancelledError, too, if the client lost a cancellation, as `wait_for` of Python 3.11 may."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except OutOfMemoryError as error:
        raise RegistryFull("Redis is full: its maxmemory is used up, and its policy evicts nothing") from error
    except Exception as error:
        if not isinstance(error, (RedisError, OSError, ValueError)):
            _unexpected.warning("unexpected error of the Redis client: %s", reason(error))
        if not isinstance(error, ResponseError) or isinstance(error, (ReadOnlyError, MasterDownError)):
            pool: Any = client.connection_pool
            pool.renew()
        refused = isinstance(error, (AuthenticationError, NoPermissionError))
        raise (RegistryRefuses if refused else RegistryUnavailable)(f"Redis: {error_text(error)}") from error
    finally:
        if task and task.cancelling() > cancels:
            raise asyncio.CancelledError


@contextlib.contextmanager
def sensible() -> Iterator[None]:
    """Convert errors in reading an answer of an unexpected type to RegistryUnavailable."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise RegistryUnavailable(f"Redis: invalid answer: {reason(error)}") from error


def error_text(error: Exception) -> str:
    """Return the error as one line."""
    if is_cluster(error):
        return CLUSTER_MODE
    code = getattr(error, "status_code", None)
    text = f"{error}" or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    return f"{code} {text}" if code and code not in text else text


def is_cluster(error: Exception) -> bool:
    """Return whether the error shows a server in Cluster mode."""
    if isinstance(error, MasterDownError):
        return False
    return isinstance(error, (ClusterDownError, ClusterCrossSlotError, MovedError, AskError)) or (
        isinstance(error, ResponseError) and "non local key" in str(error)
    )
