"""Lua scripts of the node registry in Redis or Valkey, and the script that checks a server's ACL.

A script is one round trip and atomic: it sees one state of the store. Epochs are compared as numbers, which are exact
below 2**53. Keys are built from the prefixes in KEYS, so the store must be one server (with replicas or Sentinels if
wanted), not a Redis Cluster. Leases and epochs are written even if memory is full: they are few, and without them the
rows of the index (`row_scripts`) are useless."""

# KEYS: last epoch, members. ARGV: node id, least epoch, TTL of the last epoch in ms. Returns the new epoch.
EPOCH = """#!lua flags=allow-oom
local last = tonumber(redis.call('GET', KEYS[1]) or 0)
local known = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
local epoch = string.format('%.0f', math.max(last + 1, known + 1, tonumber(ARGV[2])))
redis.call('SET', KEYS[1], epoch, 'PX', ARGV[3])
return epoch
"""

# KEYS: members, lease. ARGV: node id, epoch, packed lease, TTL in ms.
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

# KEYS: members, prefix of leases. Also drops members whose lease has expired.
NODES = """
local leases = {}
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  local lease = redis.call('GET', KEYS[2] .. id)
  if lease then leases[#leases + 1] = lease else redis.call('HDEL', KEYS[1], id) end
end
return leases
"""

# Every command of the scripts, here and in the modules beside this one, with harmless arguments: they test the ACL of a
# server. `#` stands for the key.
COMMANDS = (
    "set # 1 PX 1000", "get #", "exists #", "pexpire # 1000", "del #",
    "hset # a 1", "hincrby # a 1", "hget # a", "hmget # a", "hgetall #", "hkeys #", "hrandfield # 1",
    "hdel # a",
    "zadd # 1 a", "zcard #", "zrange # 0 0", "zrangebyscore # 0 1", "zrem # a",
    "time",
)  # fmt: skip

# KEYS: prefix of all keys. ARGV: COMMANDS. Returns the names of commands that the ACL forbids. It ignores other errors
# (out of memory, a replica, a key of another type left because DEL is forbidden).
CHECK_COMMANDS = """
local refused = {}
local function forbidden(words, key)
  local call = {}
  for word in string.gmatch(words, '%S+') do call[#call + 1] = word == '#' and key or word end
  local answer = redis.pcall(unpack(call))
  local told = type(answer) == 'table' and answer['err'] or ''
  return string.find(told, 'permission') or string.find(told, "can't run") or string.find(told, "can't access")
end
for _, words in ipairs(ARGV) do
  for _, room in ipairs({'node:', 'epoch:', 'b:', 'g:', 'r:', 'o:', 'j:', 'f:'}) do
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
