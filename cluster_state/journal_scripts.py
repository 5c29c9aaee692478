"""Lua scripts for journals of requests in Redis, run by `redis_journals`, which describes the keys."""

from kvferry.cluster_state.redis_router_leases import ALIVE

# Bookkeeping of a tenant: scores of #ages are the times at which journals expire; the next to expire is evicted first.
_BOOKKEEPING = (
    ALIVE
    + """
local WRITER_MS = 86400000 -- time for which the numbers of a writer's first and last appends are kept
local LATE_MS = 120000 -- time for which a call that comes late is known as such
local function forget(tenant, name)
  local own = KEYS[1] .. tenant
  local size = redis.call('HGET', own .. '#sizes', name)
  if size then
    redis.call('HDEL', own .. '#sizes', name)
    redis.call('HINCRBY', own .. '#sizes', '', -tonumber(size))
  end
  redis.call('ZREM', own .. '#ages', name)
  local key = redis.call('HGET', own .. ':' .. name, 'key')
  if key and key ~= '' then redis.call('DEL', own .. '#k:' .. key) end
  return redis.call('DEL', own .. ':' .. name)
end
local function prolong(tenant, name, ttl, longest)
  local own = KEYS[1] .. tenant
  redis.call('PEXPIRE', own .. ':' .. name, ttl)
  redis.call('ZADD', own .. '#ages', now + tonumber(ttl), name)
  local key = redis.call('HGET', own .. ':' .. name, 'key')
  if key and key ~= '' then redis.call('PEXPIRE', own .. '#k:' .. key, ttl) end
  redis.call('PEXPIRE', own .. '#ages', longest)
  redis.call('PEXPIRE', own .. '#sizes', longest)
end
local function create(tenant, name, owner, head, key)
  local record = KEYS[1] .. tenant .. ':' .. name
  redis.call('HSET', record, 'owner', owner)
  redis.call('HSET', record, 'head', head)
  redis.call('HSET', record, 'born', string.format('%.0f', now))
  redis.call('HSET', record, 'key', key)
end
local function grow(tenant, name, bytes, share, most)
  local own = KEYS[1] .. tenant
  if redis.call('HINCRBY', own .. '#sizes', name, bytes) > tonumber(share) then
    redis.call('HINCRBY', own .. '#sizes', '', bytes)
    forget(tenant, name)
    return false
  end
  local sum = redis.call('HINCRBY', own .. '#sizes', '', bytes)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', own .. '#ages', '-inf', now)) do
    if old ~= name then forget(tenant, old) end
  end
  sum = tonumber(redis.call('HGET', own .. '#sizes', '') or 0)
  while sum > tonumber(share) or redis.call('ZCARD', own .. '#ages') > tonumber(most) do
    local first = redis.call('ZRANGE', own .. '#ages', 0, 1)
    local old = first[1] ~= name and first[1] or first[2]
    if not old then
      forget(tenant, name)
      redis.call('DEL', own .. '#sizes')
      return false
    end
    forget(tenant, old)
    sum = tonumber(redis.call('HGET', own .. '#sizes', '') or 0)
  end
  return true
end
"""
)

# KEYS: prefix. ARGV: tenant, name, key, owner, head, TTL in ms, longest TTL in ms, most bytes, most journals.
# Returns the name of the journal that exists already; "" if this one is new now, or this call is repeated, and "!" if
# it exceeds the share or was deleted: a call that was repeated on another way may come late.
OPEN = (
    _BOOKKEEPING
    + """
local own = KEYS[1] .. ARGV[1]
if ARGV[3] ~= '' then
  local known = redis.call('GET', own .. '#k:' .. ARGV[3])
  if known and known ~= ARGV[2] and redis.call('EXISTS', own .. ':' .. known) == 1 then return known end
end
local owner = redis.call('HGET', own .. ':' .. ARGV[2], 'owner')
if owner then return owner == ARGV[4] and '' or ARGV[2] end
if redis.call('EXISTS', own .. '#d:' .. ARGV[2]) == 1 then return '!' end
create(ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[3])
if ARGV[3] ~= '' then redis.call('SET', own .. '#k:' .. ARGV[3], ARGV[2], 'PX', ARGV[6]) end
prolong(ARGV[1], ARGV[2], ARGV[6], ARGV[7])
return grow(ARGV[1], ARGV[2], #ARGV[5], ARGV[8], ARGV[9]) and '' or '!'
"""
)

# KEYS: prefix. ARGV: owner, longest TTL in ms, most bytes, most journals, writer, number of its call, then tenant,
# name, number, entry and TTL in ms of each append. Returns their outcomes as in `journals.AppendOutcome`, and the
# number of the writer's first call that the store knows. If it changes, the store has lost its data; a later answer
# tells so, too, if this one is lost.
# A writer's calls follow one another. One that comes after a later one, or again, writes nothing.
APPEND = (
    _BOOKKEEPING
    + """
local fence, begun, outcomes = KEYS[1] .. '#w:' .. ARGV[5], KEYS[1] .. '#f:' .. ARGV[5], {}
local late = tonumber(redis.call('GET', fence) or 0) >= tonumber(ARGV[6])
local first = redis.call('GET', begun) or ARGV[6]
for at = 7, #ARGV, 5 do
  local tenant, name, number, entry = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local record = KEYS[1] .. tenant .. ':' .. name
  local owner, outcome = redis.call('HGET', record, 'owner'), 1
  if not owner and number == '-1' and not late then
    create(tenant, name, ARGV[1], entry, '')
    prolong(tenant, name, ARGV[at + 4], ARGV[2])
    outcome = grow(tenant, name, #entry, ARGV[3], ARGV[4]) and 1 or 3
  elseif not owner then
    outcome = 2
  elseif owner ~= ARGV[1] then
    outcome = 0
  elseif not late then
    prolong(tenant, name, ARGV[at + 4], ARGV[2])
    if entry ~= '' and number ~= '-1' and redis.call('HSET', record, number, entry) == 1 then
      outcome = grow(tenant, name, #entry, ARGV[3], ARGV[4]) and 1 or 3
    end
  end
  outcomes[#outcomes + 1] = outcome
end
if not late then
  redis.call('SET', fence, ARGV[6], 'PX', WRITER_MS)
  redis.call('SET', begun, first, 'PX', WRITER_MS)
end
outcomes[#outcomes + 1] = first
return outcomes
"""
)

# KEYS: prefix, leases. ARGV: tenant, name, first entry, lease in ms. Returns head, owner, 1 if its lease is not over,
# age in ms, and the entries.
READ = (
    ALIVE
    + """
local record = KEYS[1] .. ARGV[1] .. ':' .. ARGV[2]
local owner = redis.call('HGET', record, 'owner')
if not owner then return false end
local found = {redis.call('HGET', record, 'head'), owner, alive(KEYS[2], owner, ARGV[4]) and 1 or 0}
found[4] = string.format('%.0f', now - tonumber(redis.call('HGET', record, 'born')))
local number = tonumber(ARGV[3])
local entry = redis.call('HGET', record, number)
while entry do
  found[#found + 1] = entry
  number = number + 1
  entry = redis.call('HGET', record, number)
end
return found
"""
)

# Numbers of calls by writer, in the record: a call that comes after a later one of its writer, or again, changes
# nothing.
_FENCE = """
local function late(record, writer, number)
  if tonumber(redis.call('HGET', record, '#' .. writer) or 0) >= tonumber(number) then return true end
  redis.call('HSET', record, '#' .. writer, number)
  return false
end
"""

# KEYS: prefix, leases. ARGV: tenant, name, owner, TTL in ms, longest TTL in ms, lease in ms, 1 to claim by force,
# writer, number of its call. Returns 1 if `owner` owns it now.
CLAIM = (
    _BOOKKEEPING
    + _FENCE
    + """
local record = KEYS[1] .. ARGV[1] .. ':' .. ARGV[2]
local owner = redis.call('HGET', record, 'owner')
if not owner then return 0 end
if late(record, ARGV[8], ARGV[9]) then return owner == ARGV[3] and 1 or 0 end
if owner ~= ARGV[3] and ARGV[7] ~= '1' and alive(KEYS[2], owner, ARGV[6]) then return 0 end
redis.call('HSET', record, 'owner', ARGV[3])
prolong(ARGV[1], ARGV[2], ARGV[4], ARGV[5])
return 1
"""
)

# KEYS: prefix. ARGV: tenant, name, owner, TTL in ms to release it or 0 to delete it, longest TTL in ms, writer,
# number of its call.
# A deleted journal with an idempotency key, and one that does not exist, cannot be opened for two minutes: its OPEN may
# come late.
RELEASE = (
    _BOOKKEEPING
    + _FENCE
    + """
local record, deleted = KEYS[1] .. ARGV[1] .. ':' .. ARGV[2], KEYS[1] .. ARGV[1] .. '#d:' .. ARGV[2]
local owner = redis.call('HGET', record, 'owner')
if not owner then redis.call('SET', deleted, '', 'PX', LATE_MS) end
if owner ~= ARGV[3] or late(record, ARGV[6], ARGV[7]) then return 0 end
if ARGV[4] == '0' then
  if redis.call('HGET', record, 'key') ~= '' then redis.call('SET', deleted, '', 'PX', LATE_MS) end
  return forget(ARGV[1], ARGV[2])
end
redis.call('HSET', record, 'owner', '')
prolong(ARGV[1], ARGV[2], ARGV[4], ARGV[5])
return 1
"""
)
