"""Records of batches in Redis or Valkey, and the fencing of the router that runs one.

kvferry:<cluster>:f:<tenant>:<id>       hash  state → the batch's record, fence → number of its holder, cancel → 1
kvferry:<cluster>:f:<tenant>#batches    sorted set  id → microseconds of its creation: the tenant's batches
kvferry:<cluster>:f:open                sorted set  <tenant>:<id> → the same: all batches that have not ended

A batch's holder writes under its number. A new holder gets the next number, and with it all writes of earlier holders
end, because each write compares the number. See `redis_files` for <tenant>, and `redis_batch_rows` for the answers."""

from __future__ import annotations

from kvferry.cluster_state import file_scripts
from kvferry.cluster_state.redis_client import answered, sensible
from kvferry.cluster_state.redis_files import FilesClient

MAX_OPEN = 10_000
"""Maximum number of open batches that `unfinished` returns."""
_GROUP = 256


class RedisBatches:
    """Batches by tenant (`where`: see `place_of`) and id. Calls raise RegistryUnavailable and may be repeated.

    ttl_s: seconds for which batches are kept after their last change."""

    def __init__(self, connection: FilesClient, *, ttl_s: float) -> None:
        self._redis, self._seal, self._ttl_ms = connection, connection.seal, int(ttl_s * 1000)
        self._create, self._hold = connection.script(file_scripts.CREATE), connection.script(file_scripts.HOLD)
        self._save, self._cancel = connection.script(file_scripts.SAVE), connection.script(file_scripts.CANCEL)
        self._page = connection.script(file_scripts.BATCHES)

    async def create(self, where: str, batch_id: str, record: bytes) -> None:
        """Store a new batch as an open one."""
        key, ids = self._key(where, batch_id), self._redis.own(where) + "#batches"
        args = [batch_id, self._seal.wrap(key, record), self._ttl_ms, f"{where}:{batch_id}"]
        await self._create.run([key, ids, self._open], args)

    async def get(self, where: str, batch_id: str) -> tuple[bytes, bool] | None:
        """Return a batch's record and whether it is to be cancelled."""
        key, redis = self._key(where, batch_id), self._redis
        state, cancel = await answered(redis.client, redis.client.hmget(key, ["state", "cancel"]), redis.limit_s)
        record = None if state is None else self._seal.unwrap(key, state)
        return None if record is None else (record, cancel is not None)

    async def all(self, where: str) -> list[tuple[bytes, bool]]:
        """Return the records of all batches, oldest first, and whether each is to be cancelled.

        Expired batches are removed from the list of ids."""
        ids, prefix = self._redis.own(where) + "#batches", self._redis.own(where) + ":"
        found, gone = list[tuple[bytes, bool]](), list[bytes]()
        for first in range(0, MAX_OPEN, _GROUP):
            answer = await self._page.run([prefix, ids], [first, first + _GROUP - 1])
            with sensible():
                for batch_id, state, cancel in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
                    record = self._seal.unwrap(prefix + batch_id.decode(), state) if state else None
                    if record is not None:
                        found.append((record, bool(cancel)))
                    elif not state:
                        gone.append(batch_id)
            if len(answer) < 3 * _GROUP:
                break
        if gone:
            await answered(self._redis.client, self._redis.client.zrem(ids, *gone), self._redis.limit_s)
        return found

    async def unfinished(self) -> list[tuple[str, str]]:
        """Return place and id of all open batches, oldest first."""
        call = self._redis.client.zrange(self._open, 0, MAX_OPEN - 1)
        with sensible():
            names = [name.decode() for name in await answered(self._redis.client, call, self._redis.limit_s)]
        return [(where, batch_id) for where, _, batch_id in (name.partition(":") for name in names)]

    async def close_open(self, where: str, batch_id: str) -> None:
        """Remove an unreadable batch from the list of open ones."""
        call = self._redis.client.zrem(self._open, f"{where}:{batch_id}")
        await answered(self._redis.client, call, self._redis.limit_s)

    async def forget(self, where: str, batch_id: str) -> None:
        """Delete an ended batch."""
        await self._redis.delete(self._key(where, batch_id))
        ids = self._redis.own(where) + "#batches"
        await answered(self._redis.client, self._redis.client.zrem(ids, batch_id), self._redis.limit_s)

    async def cancel(self, where: str, batch_id: str) -> bool:
        """Ask the batch's holder to cancel it; return whether the batch is there."""
        return bool(await self._cancel.run([self._key(where, batch_id)], []))

    async def hold(self, where: str, batch_id: str) -> tuple[bytes, int] | None:
        """Become the holder; return the record and the holder's number, which fences all earlier holders."""
        key = self._key(where, batch_id)
        answer = await self._hold.run([key], [])
        with sensible():
            record = self._seal.unwrap(key, answer[0]) if answer else None
            return None if record is None else (record, int(answer[1]))

    async def save(self, where: str, batch_id: str, fence: int, record: bytes, *, ended: bool) -> bool:
        """Save the record; return False if another process holds the batch now."""
        key = self._key(where, batch_id)
        args = [fence, self._seal.wrap(key, record), self._ttl_ms, f"{where}:{batch_id}" if ended else ""]
        return bool(await self._save.run([key, self._open], args) == b"saved")

    async def holding(self, where: str, batch_id: str, fence: int) -> tuple[bool, bool]:
        """Return whether this holder still holds the batch, and whether it is to be cancelled."""
        key, redis = self._key(where, batch_id), self._redis
        holder, cancel = await answered(redis.client, redis.client.hmget(key, ["fence", "cancel"]), redis.limit_s)
        return holder == str(fence).encode(), cancel is not None

    @property
    def _open(self) -> str:
        return self._redis.prefix + "open"

    def _key(self, where: str, batch_id: str) -> str:
        return f"{self._redis.own(where)}:{batch_id}"
