"""Clients' files in Redis or Valkey, in pieces, so that no call blocks the server or this process for long.

kvferry:<cluster>:f:<tenant>:<id>       string, the file's record; it exists once the file is complete
kvferry:<cluster>:f:<tenant>:<id>.<n>   string, the piece with number n, of CHUNK bytes except for the last
kvferry:<cluster>:f:<tenant>#ages       sorted set  id → microseconds of its completion: the tenant's files
kvferry:<cluster>:f:<tenant>#arriving   sorted set  id → microseconds of its reservation: incomplete files
kvferry:<cluster>:f:<tenant>#sizes      hash  id → bytes, and the field "" with their sum
kvferry:<cluster>:f:<tenant>#rows       sorted set  id → microseconds of its last row: rows of batches (`redis_batches`)

<tenant> is a hash of the tenant's name: fixed length, no colon, and no name readable in a dump."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from kvferry.cluster_state import file_scripts, redis_client
from kvferry.cluster_state.redis_client import CALL_TIMEOUTS, Script, answered, sensible
from kvferry.cluster_state.seal import NO_SEAL, Seal
from kvferry.protocol.errors import RegistryRefuses

CHUNK = 2**18
"""Size of a piece in bytes. Signing one takes less than a millisecond."""
ARRIVAL_S = 900.0
"""Seconds for which Redis keeps the pieces of an incomplete file."""
_GROUP = 256
"""Maximum number of pieces, records or keys in one call."""


class FilesClient:
    """Connection to the cluster's files and batches; connects on first use, reconnects by itself.

    It belongs to one asyncio loop. timeout_s: limit on every answer. password_file: see `redis_client.connected`."""

    def __init__(
        self, url: str, cluster: str, *, timeout_s: float = 1.0, password_file: str = "", seal: Seal = NO_SEAL
    ) -> None:
        self.prefix, self.seal, self._timeout_s = f"kvferry:{cluster}:f:", seal, timeout_s
        self.client: Any = redis_client.connected(url, timeout_s, password_file)
        self.limit_s = CALL_TIMEOUTS * timeout_s

    def script(self, text: str) -> Script:
        """Return a script on this connection."""
        return Script(self.client, text, self._timeout_s)

    def own(self, where: str) -> str:
        """Return the prefix of a tenant's keys; where: see `place_of`."""
        return self.prefix + where

    async def close(self) -> None:
        """Close all connections. Never raises."""
        await redis_client.close(self.client)

    async def dangers(self) -> list[str]:
        """Return the reasons for which the server may lose files, as far as INFO shows. Raises RegistryUnavailable."""
        try:
            info = await answered(self.client, self.client.info(), self.limit_s)
        except RegistryRefuses:  # its ACL forbids INFO
            return []
        found, policy = [], info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory") and policy != "noeviction":
            found.append(f"it evicts them when memory is full: set maxmemory-policy to noeviction instead of {policy}")
        if not info.get("aof_enabled", 1):
            found.append("it loses them when it restarts: set appendonly to yes")
        return found

    async def delete(self, *keys: str) -> None:
        """Delete keys. Raises RegistryUnavailable."""
        if keys:
            await answered(self.client, self.client.delete(*keys), self.limit_s)


def tenant_key(tenant: str) -> str:
    """Return the hash of the tenant's name that its keys contain."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to a reservation.

    result  "room": bytes are reserved; "there": the file is already complete; "full": too few bytes remain; "many":
            the tenant has too many files
    number  the remaining bytes, or the number of files
    """

    result: str
    number: int


class RedisFiles:
    """Files by tenant (`where`: see `place_of`) and id. Calls raise RegistryUnavailable and may be repeated.

    ttl_s: seconds for which files are kept. limit, max_files: maximum bytes and number of one tenant's files."""

    def __init__(self, connection: FilesClient, *, ttl_s: float, limit: int, max_files: int) -> None:
        self._redis, self._seal = connection, connection.seal
        self._ttl_ms, self._limit, self._max_files = int(ttl_s * 1000), limit, max_files
        self._reserve, self._commit = connection.script(file_scripts.RESERVE), connection.script(file_scripts.COMMIT)
        self._forget, self._used = connection.script(file_scripts.FORGET), connection.script(file_scripts.USED)
        self._keep, self._page = connection.script(file_scripts.KEEP), connection.script(file_scripts.FILES)

    async def reserve(self, where: str, file_id: str, size: int, replaces: str = "") -> Reserved:
        """Reserve bytes for a file; replaces: id of rows that no longer count once the file is complete."""
        args = [file_id, size, self._limit, self._max_files, self._ttl_ms, _ARRIVAL_MS, replaces]
        answer = await self._reserve.run(self._keys(where), args)
        with sensible():
            return Reserved(answer[0].decode(), int(answer[1]))

    async def write(self, where: str, file_id: str, number: int, piece: bytes) -> None:
        """Write a piece of an incomplete file."""
        key = f"{self._redis.own(where)}:{file_id}.{number}"
        call = self._redis.client.set(key, self._seal.wrap(key, piece), px=_ARRIVAL_MS)
        await answered(self._redis.client, call, self._redis.limit_s)

    async def commit(self, where: str, file_id: str, pieces: int, record: bytes, replaces: str = "") -> bool:
        """Mark a file as complete; return False if its reservation or a piece has expired."""
        prefix = f"{self._redis.own(where)}:{file_id}"
        for first in range(0, pieces, _GROUP):
            last = min(first + _GROUP, pieces) - 1
            if int(await self._keep.run([prefix + "."], [first, last, self._ttl_ms])) <= last - first:
                return False
        args = [file_id, self._seal.wrap(prefix, record), self._ttl_ms, replaces]
        return bool(await self._commit.run(self._keys(where), args))

    async def record(self, where: str, file_id: str) -> bytes | None:
        """Return a file's record."""
        return await self._get(f"{self._redis.own(where)}:{file_id}")

    async def records(self, where: str) -> list[bytes]:
        """Return the records of all files, oldest first."""
        prefix, ages, *_ = self._keys(where)
        found: list[bytes] = []
        for first in range(0, self._max_files + _GROUP, _GROUP):
            answer = await self._page.run([prefix, ages], [first, first + _GROUP - 1])
            with sensible():
                pairs = zip(answer[::2], answer[1::2], strict=True)
                unsealed = [self._seal.unwrap(prefix + file_id.decode(), record) for file_id, record in pairs if record]
            found += [record for record in unsealed if record is not None]
            if len(answer) < 2 * _GROUP:
                break
        return found

    async def piece(self, where: str, file_id: str, number: int) -> bytes | None:
        """Return a piece; None if it is no longer there."""
        return await self._get(f"{self._redis.own(where)}:{file_id}.{number}")

    async def delete(self, where: str, file_id: str, pieces: int) -> bool:
        """Delete a file, complete or not; return whether it existed."""
        known = await self._forget.run(self._keys(where), [file_id])
        prefix = f"{self._redis.own(where)}:{file_id}."
        for first in range(0, pieces, _GROUP):
            await self._redis.delete(*(f"{prefix}{number}" for number in range(first, min(first + _GROUP, pieces))))
        return bool(known)

    async def release(self, where: str, counted: str) -> None:
        """Stop counting the bytes of the rows with this id."""
        await self._forget.run(self._keys(where), [counted])

    async def remaining(self, where: str) -> int:
        """Return the number of bytes that the tenant may still use."""
        return max(0, self._limit - int(await self._used.run(self._keys(where), [self._ttl_ms, _ARRIVAL_MS])))

    async def _get(self, key: str) -> bytes | None:
        kept: bytes | None = await answered(self._redis.client, self._redis.client.get(key), self._redis.limit_s)
        return None if kept is None else self._seal.unwrap(key, kept)

    def _keys(self, where: str) -> list[str]:
        own = self._redis.own(where)
        return [own + ":", own + "#ages", own + "#sizes", own + "#arriving", own + "#rows"]


_ARRIVAL_MS = int(ARRIVAL_S * 1000)
