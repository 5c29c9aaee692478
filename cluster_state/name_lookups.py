"""DNS lookups for Redis connections: a lookup slower than a connection attempt continues, and the next one uses it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from typing import Any

import redis.asyncio as redis

from kvferry.runtime.address import resolve

LATE_RESULT_S = 30.0
"""Seconds for which the result of a lookup is kept if a caller timed out before its end."""


class NameLookups:
    """Lookups of host names, one of each name at a time; belongs to one asyncio loop.

    A lookup may take longer than a connection attempt. It continues when its callers give up, and later callers use its
    result. The result of a lookup in time is not kept, so that a changed name takes effect at once."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], asyncio.Task[list[str]]] = {}
        self._late = set[tuple[str, int]]()

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, which may be an address itself. Raises OSError."""
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        key = host, port
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.create_task(resolve(host, port), name=f"lookup of {host}")
            lookup.add_done_callback(lambda done: self._ended(key, done))
        try:
            return await asyncio.shield(lookup)
        except asyncio.CancelledError:
            self._late.add(key)
            raise

    def _ended(self, key: tuple[str, int], lookup: asyncio.Task[list[str]]) -> None:
        late, failed = key in self._late, lookup.cancelled() or lookup.exception() is not None
        self._late.discard(key)
        if late and not failed:
            asyncio.get_running_loop().call_later(LATE_RESULT_S, self._lookups.pop, key, None)
        else:
            del self._lookups[key]


class NamedConnection(redis.Connection):
    """Connection that shares lookups of its host's name with the other connections of its client (`lookups`)."""

    def __init__(self, *, lookups: NameLookups, **options: Any) -> None:
        self._lookups, self._address = lookups, ""
        super().__init__(**options)

    def _connection_arguments(self) -> dict[str, Any]:
        """Return the arguments of `asyncio.open_connection`: the address, and for TLS the name to verify."""
        arguments = dict(super()._connection_arguments())
        tls = {"server_hostname": self.host} if "ssl" in arguments else {}
        return tls | arguments | {"host": self._address}

    async def _connect(self) -> None:
        """Connect to the first address of the host that answers. Raises OSError, TimeoutError."""
        async with asyncio.timeout(self.socket_connect_timeout):
            addresses = await self._lookups.addresses(self.host, self.port)
        for address in addresses[:-1]:
            self._address = address
            with contextlib.suppress(OSError):
                return await super()._connect()  # type: ignore[no-untyped-call, no-any-return]
        self._address = addresses[-1]
        return await super()._connect()  # type: ignore[no-untyped-call, no-any-return]


class NamedTlsConnection(NamedConnection, redis.SSLConnection):
    """NamedConnection over TLS."""
