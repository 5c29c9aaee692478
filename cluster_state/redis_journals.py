"""Journals of requests in Redis or Valkey, written by routers: implementation of `journals.Journals`, and its keys.

kvferry:<cluster>:j:<tenant>:<name>     hash  owner, head, born (ms), key, the entries by number, and
                                              #<writer>: number of its last claim or release; expires
kvferry:<cluster>:j:<tenant>#k:<key>    string, the name of the journal with this idempotency key; expires with it
kvferry:<cluster>:j:<tenant>#d:<name>   string, the journal is deleted and cannot be opened again; expires
kvferry:<cluster>:j:#w:<writer>         string, number of the last append of this process; expires after a day
kvferry:<cluster>:j:#f:<writer>         string, number of its first append since the store lost its data; expires alike
kvferry:<cluster>:j:<tenant>#ages       sorted set  name → milliseconds when the journal expires
kvferry:<cluster>:j:<tenant>#sizes      hash  name → bytes, and the field "" with their sum

<tenant> and <key> are hashes: fixed length, and not readable in a dump. Heads and entries are sealed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence

from kvferry.cluster_state import redis_client
from kvferry.cluster_state.journal_calls import JournalScripts, RedisJournalScripts, ScriptFailover
from kvferry.cluster_state.journals import HEAD, MAX_JOURNALS, Append, AppendOutcome, Journal
from kvferry.cluster_state.redis_client import sensible
from kvferry.cluster_state.router_leases import STREAM_LEASE_S
from kvferry.cluster_state.seal import NO_SEAL, Seal

MAX_TTL_MS = 7 * 86_400_000
"""Maximum time for which a tenant's bookkeeping is kept after the last write, in milliseconds."""
APPENDS_PER_CALL = 64
"""Maximum number of appends in one call of the script, which runs for about 10 µs for each."""
BYTES_PER_CALL = 8 * 2**20
"""Maximum size of the entries in one call of the script, in bytes, unless one entry is longer; nodes pass on 64 MiB."""


class RedisJournals:
    """Journals of one cluster. Implements cluster_state.journals.Journals.

    Connects on first use and reconnects by itself; belongs to one asyncio loop. Calls that write carry the writer, this
    process, and ascending numbers: one that comes late, after it was repeated on another way, changes nothing.

    share          maximum number of bytes of one tenant
    max_journals   maximum number of journals of one tenant
    lease_s        seconds after its last renewal when a router counts as dead
    timeout_s      limit on every answer, because a client may wait for it
    password_file  see `redis_client.connected`
    seal           signs heads and entries; a journal ends before an entry that it does not verify
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        *,
        share: int,
        max_journals: int = MAX_JOURNALS,
        lease_s: float = STREAM_LEASE_S,
        timeout_s: float = 1.0,
        password_file: str = "",
        seal: Seal = NO_SEAL,
    ) -> None:
        self._bounds, self._lease_ms, self._seal = [MAX_TTL_MS, share, max_journals], int(lease_s * 1000), seal
        self._client = redis_client.connected(url, timeout_s, password_file)
        self._scripts = ScriptFailover(RedisJournalScripts(self._client, cluster, timeout_s))
        self.erased_at, self._first_append = 0.0, b""
        self._writer, self._numbers, self._appending = secrets.token_hex(8), itertools.count(1), asyncio.Lock()

    def fall_back_on(self, relay: JournalScripts) -> None:
        """Call the scripts through a node while the store does not answer this process."""
        self._scripts.relay = relay

    async def close(self) -> None:
        """Close all connections. Never raises."""
        await self._scripts.close()
        await redis_client.close(self._client)

    async def open(self, tenant: str, name: str, owner: str, head: bytes, *, key: str = "", ttl_s: float) -> str:
        sealed = self._seal.wrap(f"{tenant}:{name}", head)
        args: list[str | bytes | int] = [_hashed(tenant), name]
        args += [key and _hashed(key), owner, sealed, _ms(ttl_s), *self._bounds]
        answer = await self._scripts.run("open", args)
        with sensible():
            return answer[0].decode()

    async def append(self, owner: str, appends: list[Append]) -> list[AppendOutcome]:
        outcomes: list[AppendOutcome] = []
        async with self._appending:  # one that comes after a later one would write nothing
            for batch in _batches(appends):
                outcomes += await self._append(owner, batch)
        return outcomes

    async def _append(self, owner: str, batch: list[Append]) -> list[AppendOutcome]:
        args: list[str | bytes | int] = [owner, *self._bounds, *self._next_call()]
        for tenant, name, number, entry, ttl_s in batch:
            place = f"{tenant}:{name}" if number == HEAD else f"{tenant}:{name}/{number}"
            sealed = self._seal.wrap(place, entry) if entry else entry
            args += (_hashed(tenant), name, number, sealed, _ms(ttl_s))
        answer = await self._scripts.run("append", args)
        with sensible():
            outcomes, first = answer[: len(batch)], b"".join(answer[len(batch) :])  # nodes of older versions give none
            if first and self._first_append not in (b"", first):
                self.erased_at = time.monotonic()
            self._first_append = first or self._first_append
            return [AppendOutcome(int(each)) for each, _ in zip(outcomes, batch, strict=True)]

    async def read(self, tenant: str, name: str, since: int = 0) -> Journal | None:
        answer = await self._scripts.run("read", [_hashed(tenant), name, since, self._lease_ms])
        if not answer:
            return None
        with sensible():
            sealed, owner, is_owned, age_ms, *rest = answer
            head = self._seal.unwrap(f"{tenant}:{name}", sealed)
            if head is None:
                return None
            entries: list[bytes] = []
            for number, each in enumerate(rest, start=since):
                entry = self._seal.unwrap(f"{tenant}:{name}/{number}", each)
                if entry is None:
                    break
                entries.append(entry)
            return Journal(head, entries, owner.decode(), is_owned == b"1", int(age_ms) / 1000)

    async def claim(self, tenant: str, name: str, owner: str, *, ttl_s: float, by_force: bool = False) -> bool:
        args: list[str | int] = [_hashed(tenant), name, owner, _ms(ttl_s), MAX_TTL_MS, self._lease_ms, int(by_force)]
        return await self._succeeds("claim", [*args, *self._next_call()])

    async def release(self, tenant: str, name: str, owner: str, *, ttl_s: float) -> bool:
        return await self._end_ownership(tenant, name, owner, _ms(ttl_s))

    async def drop(self, tenant: str, name: str, owner: str) -> bool:
        return await self._end_ownership(tenant, name, owner, 0)

    async def _end_ownership(self, tenant: str, name: str, owner: str, ttl_ms: int) -> bool:
        args: list[str | int] = [_hashed(tenant), name, owner, ttl_ms, MAX_TTL_MS]
        return await self._succeeds("release", [*args, *self._next_call()])

    async def _succeeds(self, script: str, args: Sequence[str | bytes | int]) -> bool:
        return await self._scripts.run(script, args) == (b"1",)

    def _next_call(self) -> tuple[str, int]:
        """Return the writer and the number of its next call."""
        return self._writer, next(self._numbers)


def _batches(appends: list[Append]) -> Iterator[list[Append]]:
    """Yield the appends of each call of the script."""
    batch, size = list[Append](), 0
    for each in appends:
        if batch and (len(batch) == APPENDS_PER_CALL or size + len(each.entry) > BYTES_PER_CALL):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += len(each.entry)
    if batch:
        yield batch


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _ms(ttl_s: float) -> int:
    return min(max(1, int(ttl_s * 1000)), MAX_TTL_MS)
