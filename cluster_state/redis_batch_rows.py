"""Results of the rows (requests) of API batches in Redis or Valkey, in pieces, with ROWS rows under one key.

kvferry:<cluster>:f:<tenant>:<id>.<k>   hash  the answers of ROWS rows: row → mark, row.n → a piece of its answer

The mark shows that a row is answered. It is written once, with the last piece, by the batch's holder only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.cluster_state import file_scripts
from kvferry.cluster_state.redis_client import answered, sensible
from kvferry.cluster_state.redis_files import CHUNK, FilesClient
from kvferry.protocol.errors import NotFound

ROWS = 256
"""Number of rows whose answers share a key."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Stored answer to a row: whether it succeeded, the number of its pieces, their size in bytes."""

    ok: bool
    pieces: int
    bytes: int


class RedisBatchRows:
    """Answers to rows, by tenant (`where`: see `place_of`) and batch. Calls raise RegistryUnavailable; may be repeated.

    ttl_s: seconds for which answers are kept after the last one. limit: maximum bytes of a tenant's files and answers.
    """

    def __init__(self, connection: FilesClient, *, ttl_s: float, limit: int) -> None:
        self._redis, self._seal = connection, connection.seal
        self._ttl_ms, self._limit = int(ttl_s * 1000), limit
        self._row = connection.script(file_scripts.ROW)

    async def write(self, where: str, batch_id: str, fence: int, row: int, line: bytes, *, ok: bool) -> str:
        """Write a row's answer, in several calls if it is long.

        Returns written, there (already written), full (the tenant's bytes are used up), or lost (another process holds
        the batch now)."""
        shard, pieces = self._shard(where, batch_id, row // ROWS), max(1, -(-len(line) // CHUNK))
        own, counted, result = self._redis.own(where), rows_id(batch_id, ok=ok), "written"
        keys = [f"{own}:{batch_id}", shard, own + "#sizes", own + "#rows"]
        for number in range(pieces):
            field = f"{row}.{number}"
            piece = self._seal.wrap(f"{shard}/{field}", line[number * CHUNK : (number + 1) * CHUNK])
            mark = f"{int(ok)} {pieces} {len(line)}".encode() if number == pieces - 1 else b""
            sealed = self._seal.wrap(f"{shard}/{row}", mark) if mark else b""
            args = [fence, row, field, piece, sealed, len(line), counted, self._limit, self._ttl_ms]
            result = (await self._row.run(keys, args)).decode()
            if result != "written":
                break
        return result

    async def rows(self, where: str, batch_id: str, shard: int) -> dict[int, Answered]:
        """Return the answered rows among the ROWS of one shard."""
        key, redis = self._shard(where, batch_id, shard), self._redis
        names = await answered(redis.client, redis.client.hkeys(key), redis.limit_s)
        with sensible():
            rows = sorted(int(name) for name in names if b"." not in name)
        marks = await answered(redis.client, redis.client.hmget(key, rows), redis.limit_s) if rows else []
        found = {}
        with sensible():
            for row, mark in zip(rows, marks, strict=True):
                if unsealed := self._seal.unwrap(f"{key}/{row}", mark or b""):
                    ok, pieces, size = map(int, unsealed.split())
                    found[row] = Answered(bool(ok), pieces, size)
        return found

    async def pieces(self, where: str, batch_id: str, shard: int, fields: Iterable[tuple[int, int]]) -> bytes:
        """Return pieces of a shard's answers, joined; fields: row and number of each. Raises NotFound for a loss."""
        key, redis = self._shard(where, batch_id, shard), self._redis
        names = [f"{row}.{number}" for row, number in fields]
        kept = await answered(redis.client, redis.client.hmget(key, names), redis.limit_s)
        with sensible():
            found = [self._seal.unwrap(f"{key}/{name}", piece or b"") for name, piece in zip(names, kept, strict=True)]
        if not all(found):
            raise NotFound(f"answers of {batch_id} are missing")
        return b"".join(piece for piece in found if piece)

    async def clear(self, where: str, batch_id: str, rows: int) -> None:
        """Delete the answers of this many rows."""
        for shard in range(-(-rows // ROWS)):
            await self._redis.delete(self._shard(where, batch_id, shard))

    def _shard(self, where: str, batch_id: str, shard: int) -> str:
        return f"{self._redis.own(where)}:{batch_id}.{shard}"


def rows_id(batch_id: str, *, ok: bool) -> str:
    """Return the id under which a batch's answers count; ok: those that succeeded, else those that failed."""
    return f"{batch_id}{'+' if ok else '-'}"
