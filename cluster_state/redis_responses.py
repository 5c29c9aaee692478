"""Stored responses (`/v1/responses`) in Redis or Valkey: implementation of `responses.ResponseStore`, and its keys.

kvferry:<cluster>:r:<tenant>:<id>    string, the record; expires after ttl_s
kvferry:<cluster>:r:<tenant>#ages    sorted set  id → microseconds of its writing: the tenant's records, by age
kvferry:<cluster>:r:<tenant>#sizes   hash  id → bytes, and the field "" with their sum

<tenant> is a hash of the tenant's name: fixed length, no colon, and no name readable in a dump."""

from __future__ import annotations

import hashlib

from kvferry.cluster_state import redis_client
from kvferry.cluster_state.redis_client import CALL_TIMEOUTS, Script, answered
from kvferry.cluster_state.responses import MAX_RESPONSES
from kvferry.cluster_state.seal import NO_SEAL, Seal

_FORGET = """
local function forget(id)
  local size = redis.call('HGET', KEYS[3], id)
  if size then
    redis.call('HDEL', KEYS[3], id)
    redis.call('HINCRBY', KEYS[3], '', -tonumber(size))
  end
  redis.call('ZREM', KEYS[2], id)
  return redis.call('DEL', KEYS[1] .. id)
end
"""

# KEYS: prefix of records, ages, sizes. ARGV: id, record, TTL in ms, most bytes, most records. If only the new record is
# left to evict, the bookkeeping was wrong (Redis lost a key) and starts again.
PUT = (
    _FORGET
    + """
local time = redis.call('TIME')
local now, ttl = time[1] * 1000000 + time[2], tonumber(ARGV[3])
forget(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ttl * 1000)) do forget(id) end
redis.call('SET', KEYS[1] .. ARGV[1], ARGV[2], 'PX', ttl)
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2])
local sum = redis.call('HINCRBY', KEYS[3], '', #ARGV[2])
while sum > tonumber(ARGV[4]) or redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[5]) do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest or oldest == ARGV[1] then
    redis.call('DEL', KEYS[3])
    redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2], '', #ARGV[2])
    break
  end
  forget(oldest)
  sum = tonumber(redis.call('HGET', KEYS[3], '') or 0)
end
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
"""
)

# KEYS: prefix of records, ages, sizes. ARGV: id.
DELETE = _FORGET + "return forget(ARGV[1])"


class RedisResponses:
    """Responses of one cluster. Implements cluster_state.responses.ResponseStore.

    Connects on first use and reconnects by itself; belongs to one asyncio loop.

    ttl_s          seconds after which a record expires
    share          maximum number of bytes of one tenant
    max_records    maximum number of records of one tenant
    timeout_s      limit on every answer, because a client waits for it
    password_file  see `redis_client.connected`
    seal           signs records; a record that it does not verify counts as missing
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        *,
        ttl_s: float,
        share: int,
        max_records: int = MAX_RESPONSES,
        timeout_s: float = 1.0,
        password_file: str = "",
        seal: Seal = NO_SEAL,
    ) -> None:
        self._seal = seal
        self._prefix = f"kvferry:{cluster}:r:"
        self._bounds = [max(1, int(ttl_s * 1000)), share, max_records]
        self._share = share
        self._client, self._limit_s = redis_client.connected(url, timeout_s, password_file), CALL_TIMEOUTS * timeout_s
        self._put, self._delete = Script(self._client, PUT, timeout_s), Script(self._client, DELETE, timeout_s)

    async def close(self) -> None:
        """Close all connections. Never raises."""
        await redis_client.close(self._client)

    async def put(self, tenant: str, response_id: str, record: bytes) -> bool:
        keys = self._keys(tenant)
        wrapped = self._seal.wrap(keys[0] + response_id, record)
        if len(wrapped) > self._share:
            return False
        await self._put.run(keys, [response_id, wrapped, *self._bounds])
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        key = self._keys(tenant)[0] + response_id
        record: bytes | None = await answered(self._client, self._client.get(key), self._limit_s)
        return None if record is None else self._seal.unwrap(key, record)

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await self._delete.run(self._keys(tenant), [response_id]))

    def _keys(self, tenant: str) -> list[str]:
        own = self._prefix + hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
        return [own + ":", own + "#ages", own + "#sizes"]
