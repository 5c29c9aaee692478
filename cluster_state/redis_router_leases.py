"""Leases of routers and owners of their tasks in Redis or Valkey: implementation of `router_leases.RouterLeases`.

kvferry:<cluster>:o:leases     hash  router → milliseconds of its last renewal, by the server's clock
kvferry:<cluster>:o:owners     sorted set  routers that own tasks; the empty name owns released ones
kvferry:<cluster>:o:of:<id>    sorted set  <kind>:<name> → milliseconds of its claim: the tasks of one router
kvferry:<cluster>:o:t:<task>   string, the owner of a task; expires with the task

They are not sealed, because they grant nothing: an attacker who writes here can only stop or repeat work, like one who
deletes keys, and the records of the work are sealed."""

from __future__ import annotations

from kvferry.cluster_state import redis_client
from kvferry.cluster_state.redis_client import CALL_TIMEOUTS, Script, answered, sensible
from kvferry.cluster_state.router_leases import MAX_ORPHANS, ROUTER_LEASE_S, OwnedTask

FORGET_MS = 7 * 86_400_000
"""Maximum time for which a task, a list of tasks or a lease is kept, in milliseconds."""

ALIVE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function alive(leases, owner, lease)
  local renewed = owner ~= '' and redis.call('HGET', leases, owner)
  return renewed and now - tonumber(renewed) <= tonumber(lease)
end
"""
"""Defines alive(key of the leases, owner, lease in ms), and now."""

# KEYS: prefix. ARGV: owner, most TTL in ms.
_RENEW = (
    ALIVE
    + """
redis.call('HSET', KEYS[1] .. 'leases', ARGV[1], string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1] .. 'leases', ARGV[2])
"""
)

# KEYS: prefix. ARGV: owner, lease in ms.
_IS_ALIVE = ALIVE + "return alive(KEYS[1] .. 'leases', ARGV[1], ARGV[2]) and 1 or 0"

_ASSIGN = """
local function give(task, owner, ttl)
  redis.call('SET', KEYS[1] .. 't:' .. task, owner, 'PX', ttl)
  for _, key in ipairs({'of:' .. owner, 'owners'}) do
    redis.call('ZADD', KEYS[1] .. key, now, key == 'owners' and owner or task)
    redis.call('PEXPIRE', KEYS[1] .. key, ARGV[#ARGV])
  end
end
"""

# KEYS: prefix. ARGV: owner, task, TTL in ms, lease in ms, kind of claim (take, claim or force), most TTL in ms.
# Returns 1 if `owner` owns it now.
_CLAIM = (
    ALIVE
    + _ASSIGN
    + """
local known = redis.call('GET', KEYS[1] .. 't:' .. ARGV[2])
if not known and ARGV[5] ~= 'take' then return 0 end
if known and known ~= ARGV[1] and ARGV[5] ~= 'force' then
  if ARGV[5] == 'take' or alive(KEYS[1] .. 'leases', known, ARGV[4]) then return 0 end
end
if known then redis.call('ZREM', KEYS[1] .. 'of:' .. known, ARGV[2]) end
give(ARGV[2], ARGV[1], ARGV[3])
return 1
"""
)

# KEYS: prefix. ARGV: owner, task, TTL in ms to release it or 0 to end it, most TTL in ms. Returns 1 if it was owned.
_RELEASE = (
    ALIVE
    + _ASSIGN
    + """
local key = KEYS[1] .. 't:' .. ARGV[2]
if redis.call('GET', key) ~= ARGV[1] then return 0 end
redis.call('ZREM', KEYS[1] .. 'of:' .. ARGV[1], ARGV[2])
if ARGV[3] == '0' then redis.call('DEL', key) else give(ARGV[2], '', ARGV[3]) end
return 1
"""
)

# KEYS: prefix. ARGV: lease in ms, most tasks. Also drops owners without tasks, and tasks that have expired.
_ORPHANS = (
    ALIVE
    + """
local found = {}
for _, owner in ipairs(redis.call('ZRANGE', KEYS[1] .. 'owners', 0, -1)) do
  if not alive(KEYS[1] .. 'leases', owner, ARGV[1]) then
    local tasks = redis.call('ZRANGE', KEYS[1] .. 'of:' .. owner, 0, ARGV[2])
    for _, task in ipairs(tasks) do
      if redis.call('GET', KEYS[1] .. 't:' .. task) ~= owner then
        redis.call('ZREM', KEYS[1] .. 'of:' .. owner, task)
      elseif #found < tonumber(ARGV[2]) then
        found[#found + 1] = task
      end
    end
    if #tasks == 0 then
      redis.call('ZREM', KEYS[1] .. 'owners', owner)
      redis.call('HDEL', KEYS[1] .. 'leases', owner)
    end
  end
end
return found
"""
)


class RedisRouterLeases:
    """Leases of one cluster's routers. Implements cluster_state.router_leases.RouterLeases.

    Connects on first use and reconnects by itself; belongs to one asyncio loop. lease_s: seconds after its last renewal
    when a router counts as dead. timeout_s: limit on every answer. password_file: see `redis_client.connected`."""

    def __init__(
        self,
        url: str,
        cluster: str,
        *,
        lease_s: float = ROUTER_LEASE_S,
        timeout_s: float = 1.0,
        password_file: str = "",
    ) -> None:
        self._keys, self._lease_ms = [f"kvferry:{cluster}:o:"], int(lease_s * 1000)
        self._client, self._limit_s = redis_client.connected(url, timeout_s, password_file), CALL_TIMEOUTS * timeout_s

        def script(text: str) -> Script:
            return Script(self._client, text, timeout_s)

        self._renew, self._alive, self._claim = script(_RENEW), script(_IS_ALIVE), script(_CLAIM)
        self._release, self._orphans = script(_RELEASE), script(_ORPHANS)

    async def close(self) -> None:
        """Close all connections. Never raises."""
        await redis_client.close(self._client)

    async def renew(self, owner: str) -> None:
        await self._renew.run(self._keys, [owner, FORGET_MS])

    async def withdraw(self, owner: str) -> None:
        deleted = self._client.hdel(f"{self._keys[0]}leases", owner)
        await answered(self._client, deleted, self._limit_s)

    async def alive(self, owner: str) -> bool:
        return bool(await self._alive.run(self._keys, [owner, self._lease_ms]))

    async def take(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        return await self._claimed(owner, task, ttl_s, "take")

    async def claim(self, owner: str, task: OwnedTask, ttl_s: float, *, by_force: bool = False) -> bool:
        return await self._claimed(owner, task, ttl_s, "force" if by_force else "claim")

    async def holds(self, owner: str, task: OwnedTask) -> bool:
        key = f"{self._keys[0]}t:{_member(task)}"
        found: bytes | None = await answered(self._client, self._client.get(key), self._limit_s)
        return found == owner.encode()

    async def release(self, owner: str, task: OwnedTask, ttl_s: float) -> bool:
        return bool(await self._release.run(self._keys, [owner, _member(task), _ms(ttl_s), FORGET_MS]))

    async def drop(self, owner: str, task: OwnedTask) -> bool:
        return bool(await self._release.run(self._keys, [owner, _member(task), 0, FORGET_MS]))

    async def orphans(self) -> list[OwnedTask]:
        answer = await self._orphans.run(self._keys, [self._lease_ms, MAX_ORPHANS])
        with sensible():
            return [OwnedTask(*member.decode().split(":", 1)) for member in answer]

    async def _claimed(self, owner: str, task: OwnedTask, ttl_s: float, how: str) -> bool:
        args = [owner, _member(task), _ms(ttl_s), self._lease_ms, how, FORGET_MS]
        return bool(await self._claim.run(self._keys, args))


def _member(task: OwnedTask) -> str:
    return f"{task.kind}:{task.name}"


def _ms(ttl_s: float) -> int:
    return min(max(1, int(ttl_s * 1000)), FORGET_MS)
