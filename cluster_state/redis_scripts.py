"""The Lua that runs inside Redis or Valkey. A script is one round trip and atomic: it sees one state of the store.

Block hashes travel as one string of 16 bytes each. Epochs are compared as numbers, exact below 2**53. Keys are built
from the prefixes in KEYS, so the store is one server (with replicas or sentinels if wanted), not a Redis Cluster.
"""

# KEYS: members, lease. ARGV: node id, epoch, packed lease, life in ms.
ANNOUNCE = """
local alive = redis.call('EXISTS', KEYS[2]) == 1
local known = redis.call('HGET', KEYS[1], ARGV[1])
if alive and known and tonumber(known) > tonumber(ARGV[2]) then return 'fenced' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return (alive and known == ARGV[2]) and 'renewed' or 'created'
"""

# KEYS: members, lease. ARGV: node id, epoch.
WITHDRAW = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
end
"""

# KEYS: members, prefix of leases. Members whose lease has expired are dropped on the way.
NODES = """
local leases = {}
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  local lease = redis.call('GET', KEYS[2] .. id)
  if lease then leases[#leases + 1] = lease else redis.call('HDEL', KEYS[1], id) end
end
return leases
"""

_ROWS = """
local id, epoch, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local function each(hashes, visit)
  for at = 1, #hashes, 16 do visit(KEYS[1] .. string.sub(hashes, at, at + 15)) end
end
local function store(key)
  local other = redis.call('HGET', key, id)
  if not other or tonumber(other) < tonumber(epoch) then redis.call('HSET', key, id, epoch) end
  redis.call('PEXPIRE', key, ttl_ms)
end
local function remove(key)
  if redis.call('HGET', key, id) == epoch then redis.call('HDEL', key, id) end
end
"""

# KEYS: prefix of rows. ARGV: node id, epoch, ttl in ms, hashes stored, hashes removed.
PUBLISH = (
    _ROWS
    + """
each(ARGV[5], remove)
each(ARGV[4], store)
"""
)

# KEYS: prefix of rows, prefix of leases. ARGV: node id, epoch, ttl in ms, hashes.
REFRESH = (
    _ROWS
    + """
local alive = {[id] = true}
each(ARGV[4], function(key)
  store(key)
  for _, other in ipairs(redis.call('HKEYS', key)) do
    if alive[other] == nil then alive[other] = redis.call('EXISTS', KEYS[2] .. other) == 1 end
    if not alive[other] then redis.call('HDEL', key, other) end
  end
end)
"""
)

# KEYS: prefix of rows. ARGV: hashes, then node id and epoch of each node asked for. Answers id, length, id, length, …
# The search of each node is that of `cluster_state.index.longest`, with positions counted from 1; nodes whose
# next question is the same position are asked together.
LONGEST_PREFIX = """
local count, live, answer = #ARGV[1] / 16, {}, {}
for at = 2, #ARGV, 2 do live[ARGV[at]] = ARGV[at + 1] end
local function key(i) return KEYS[1] .. string.sub(ARGV[1], 16 * i - 15, 16 * i) end
local function ask(ids, i)
  local holding, others = {}, {}
  for at, epoch in ipairs(redis.call('HMGET', key(i), unpack(ids))) do
    local group = epoch == live[ids[at]] and holding or others
    group[#group + 1] = ids[at]
  end
  return holding, others
end
local function bisect(ids, low, high)
  if #ids == 0 then return end
  if high - low == 1 then
    for _, id in ipairs(ids) do
      answer[#answer + 1] = id
      answer[#answer + 1] = low
    end
    return
  end
  local middle = math.floor((low + high) / 2)
  local holding, others = ask(ids, middle)
  bisect(holding, middle, high)
  bisect(others, low, middle)
end
local ids, first = {}, redis.call('HGETALL', key(1))
for at = 1, #first, 2 do
  if live[first[at]] == first[at + 1] then ids[#ids + 1] = first[at] end
end
local low, high = 1, 2
while #ids > 0 and high <= count do
  local holding, others = ask(ids, high)
  bisect(others, low, high)
  ids, low, high = holding, high, 2 * high
end
bisect(ids, low, math.min(high, count + 1))
return answer
"""
