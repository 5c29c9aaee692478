"""The Lua that runs inside Redis or Valkey. A script is one round trip and atomic: it sees one state of the store.

Block hashes travel as one string of 16 bytes each. Epochs are compared as numbers, exact below 2**53. Keys are built
from the prefixes in KEYS, so the store is one server (with replicas or Sentinels if wanted), not a Redis Cluster.

Where memory is full, leases and epochs are written all the same: there are few of them, and without them the rows are
of no use. Rows that are there live on; new ones are refused.
"""

# KEYS: last epoch, members. ARGV: node id, least epoch, life in ms of what is remembered. Answers the new epoch.
EPOCH = """#!lua flags=allow-oom
local last = tonumber(redis.call('GET', KEYS[1]) or 0)
local known = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
local epoch = string.format('%.0f', math.max(last + 1, known + 1, tonumber(ARGV[2])))
redis.call('SET', KEYS[1], epoch, 'PX', ARGV[3])
return epoch
"""

# KEYS: members, lease. ARGV: node id, epoch, packed lease, life in ms.
ANNOUNCE = """#!lua flags=allow-oom
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

# Each command that a script calls costs the server a microsecond and more. A registered epoch, which nearly all writers
# have, asks for no row before it writes it: rows of the node's other epochs are void. Where memory is full and that is
# refused, it asks: what is there lives on.
# Rows stand under a node's id, or under `index.on_tier` of it, whose lease is the node's, or under `index.ON_STORE`.
_ROWS = """
local call, sub, prefix = redis.call, string.sub, KEYS[1]
local id, epoch, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local function owner(name) return string.match(name, '^(.-)\\31') or name end
local registered = call('HGET', KEYS[2], owner(id)) == epoch
local function each(hashes, visit)
  for at = 1, #hashes, 16 do visit(prefix .. sub(hashes, at, at + 15)) end
end
local function known(key)
  local other = call('HGET', key, id)
  return other == epoch or other and not registered and tonumber(other) > tonumber(epoch)
end
local function store(key)
  local written = registered and type(redis.pcall('HSET', key, id, epoch)) ~= 'table'
  if not written and not known(key) then call('HSET', key, id, epoch) end
  call('PEXPIRE', key, ttl_ms)
end
local function remove(key)
  if registered or call('HGET', key, id) == epoch then call('HDEL', key, id) end
end
"""

# KEYS: prefix of rows, members. ARGV: node id, epoch, ttl in ms, hashes stored, hashes removed.
PUBLISH = (
    _ROWS
    + """
each(ARGV[5], remove)
each(ARGV[4], store)
"""
)

# KEYS: prefix of rows, members, prefix of leases. ARGV: node id, epoch, ttl in ms, hashes.
REFRESH = (
    _ROWS
    + """
local alive = {[id] = true, ['\\31store'] = true}
each(ARGV[4], function(key)
  store(key)
  for _, other in ipairs(redis.call('HKEYS', key)) do
    if alive[other] == nil then alive[other] = redis.call('EXISTS', KEYS[3] .. owner(other)) == 1 end
    if not alive[other] then redis.call('HDEL', key, other) end
  end
end)
"""
)

# KEYS: prefix of rows. ARGV: node id, epoch, hashes. Answers how many of the node's rows are there.
PRESENT = """
local found = 0
for at = 1, #ARGV[3], 16 do
  local key = KEYS[1] .. string.sub(ARGV[3], at, at + 15)
  if redis.call('HGET', key, ARGV[1]) == ARGV[2] then found = found + 1 end
end
return found
"""

# KEYS: prefix of rows. ARGV: the name of the store; then for each question the hashes, and those that stand for the
# store's groups, none unless it is asked for. Answers to each id, epoch, length of each node that holds the first
# block; whose epochs live is for who asks to know, since a thousand of them would cost more to send than the search.
# The search of each node is that of `cluster_state.prefixes.longest`, with positions counted from 1; nodes whose
# next question is the same position are asked together.
LONGEST_PREFIX = """
local call, sub, prefix, answers = redis.call, string.sub, KEYS[1], {}
local hashes, epochs, answer
local function key(i) return prefix .. sub(hashes, 16 * i - 15, 16 * i) end
local function ask(ids, i)
  local holding, others = {}, {}
  for at, epoch in ipairs(call('HMGET', key(i), unpack(ids))) do
    local group = epoch == epochs[ids[at]] and holding or others
    group[#group + 1] = ids[at]
  end
  return holding, others
end
local function bisect(ids, low, high)
  if #ids == 0 then return end
  if high - low == 1 then
    for _, id in ipairs(ids) do
      answer[#answer + 1] = id
      answer[#answer + 1] = epochs[id]
      answer[#answer + 1] = low
    end
    return
  end
  local middle = math.floor((low + high) / 2)
  local holding, others = ask(ids, middle)
  bisect(holding, middle, high)
  bisect(others, low, middle)
end
local function search(ids)
  local count, low, high = #hashes / 16, 1, 4
  while #ids > 0 and high <= count do
    local holding, others = ask(ids, high)
    bisect(others, low, high)
    ids, low, high = holding, high, 4 * high
  end
  bisect(ids, low, math.min(high, count + 1))
end
local store = ARGV[1]
for at = 2, #ARGV, 2 do
  local ids = {}
  hashes, epochs, answer = ARGV[at], {}, {}
  local first = call('HGETALL', key(1))
  for place = 1, #first, 2 do
    ids[#ids + 1] = first[place]
    epochs[first[place]] = first[place + 1]
  end
  search(ids)
  hashes = ARGV[at + 1]
  if hashes ~= '' then
    epochs[store] = call('HGET', key(1), store)
    if epochs[store] then search({store}) end
  end
  answers[#answers + 1] = answer
end
return answers
"""

# Every command of the scripts, here and in `redis_responses`, with arguments that change nothing that anybody uses: the
# ACL of a server is tried with them. `#` stands for the key.
COMMANDS = (
    "set # 1 PX 1000", "get #", "exists #", "pexpire # 1000", "del #",
    "hset # a 1", "hincrby # a 1", "hget # a", "hmget # a", "hgetall #", "hkeys #", "hdel # a",
    "zadd # 1 a", "zcard #", "zrange # 0 0", "zrangebyscore # 0 1", "zrem # a",
    "time",
)  # fmt: skip

# KEYS: prefix of all keys. ARGV: COMMANDS. Answers the names of those that its ACL forbids. What else may be wrong (no
# memory, a replica, another type left where DEL is forbidden) is not this script's affair.
REHEARSAL = """
local refused = {}
local function forbidden(words, key)
  local call = {}
  for word in string.gmatch(words, '%S+') do call[#call + 1] = word == '#' and key or word end
  local answer = redis.pcall(unpack(call))
  local told = type(answer) == 'table' and answer['err'] or ''
  return string.find(told, 'permission') or string.find(told, "can't run") or string.find(told, "can't access")
end
for _, words in ipairs(ARGV) do
  for _, room in ipairs({'node:', 'epoch:', 'b:', 'r:'}) do
    local key = KEYS[1] .. room .. 'rehearsal'
    local told = forbidden(words, key)
    redis.pcall('DEL', key)
    redis.pcall('PEXPIRE', key, 1000)
    if told then
      refused[#refused + 1] = string.match(words, '%S+')
      break
    end
  end
end
return refused
"""
