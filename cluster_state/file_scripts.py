"""Lua scripts for clients' files and batches in Redis, run by `redis_files`, `redis_batches` and `redis_batch_rows`.

No script writes more than one piece of a file, so that none blocks the server."""

# KEYS of the scripts of files: prefix of records, ages, sizes, arriving, rows. `sizes` has bytes by id, and the sum
# under the empty id. A prune removes at most a hundred ids, so that no call blocks the server.
_COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function release(id)
  local size = redis.call('HGET', KEYS[3], id)
  if not size then return false end
  redis.call('HDEL', KEYS[3], id)
  redis.call('HINCRBY', KEYS[3], '', -tonumber(size))
  return true
end
local function forget(id)
  for _, key in ipairs({KEYS[2], KEYS[4], KEYS[5]}) do redis.call('ZREM', key, id) end
  local known = release(id)
  return redis.call('DEL', KEYS[1] .. id) == 1 or known
end
local function prune(key, life_ms)
  local old = now - tonumber(life_ms) * 1000
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', old, 'LIMIT', 0, 100)) do forget(id) end
end
local function outlive(ttl_ms)
  for number = 2, 5 do redis.call('PEXPIRE', KEYS[number], tonumber(ttl_ms) + 86400000) end
end
local function sum() return tonumber(redis.call('HGET', KEYS[3], '') or 0) end
"""

# ARGV: id, bytes, most bytes, most files, TTL in ms, TTL of incomplete files in ms, id of the replaced rows
# or empty. Returns the decision, and the bytes or the number of files on which it is based.
RESERVE = (
    _COMMON
    + """
prune(KEYS[2], ARGV[5])
prune(KEYS[4], ARGV[6])
prune(KEYS[5], ARGV[5])
if redis.call('EXISTS', KEYS[1] .. ARGV[1]) == 1 then return {'there', 0} end
local old, replaced = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or 0), 0
if ARGV[7] ~= '' then replaced = tonumber(redis.call('HGET', KEYS[3], ARGV[7]) or 0) end
local left, files = tonumber(ARGV[3]) - sum() + old + replaced, redis.call('ZCARD', KEYS[2])
if tonumber(ARGV[2]) > left then return {'full', math.max(left, 0)} end
if files >= tonumber(ARGV[4]) then return {'many', files} end
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[3], '', ARGV[2] - old)
redis.call('ZADD', KEYS[4], now, ARGV[1])
outlive(ARGV[5])
return {'room', left}
"""
)

# ARGV: id, record, TTL in ms, id of the replaced rows or empty. Returns 0 if the reservation has ended.
COMMIT = (
    _COMMON
    + """
if not redis.call('HGET', KEYS[3], ARGV[1]) then return 0 end
redis.call('SET', KEYS[1] .. ARGV[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
if ARGV[4] ~= '' then
  redis.call('ZREM', KEYS[5], ARGV[4])
  release(ARGV[4])
end
outlive(ARGV[3])
return 1
"""
)

# ARGV: id. Returns 1 if it was known.
FORGET = _COMMON + "return forget(ARGV[1]) and 1 or 0"

# ARGV: TTL in ms, TTL of incomplete files in ms. Returns the bytes in use.
USED = _COMMON + "prune(KEYS[2], ARGV[1]) prune(KEYS[4], ARGV[2]) prune(KEYS[5], ARGV[1]) return sum()"

# KEYS: prefix of pieces. ARGV: first, last, TTL in ms. Returns the number of existing pieces.
KEEP = """
local found = 0
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  found = found + redis.call('PEXPIRE', KEYS[1] .. string.format('%d', number), ARGV[3])
end
return found
"""

# KEYS: prefix of records, a sorted set of ids. ARGV: first, last. Returns id and record in turn; an expired record is
# empty.
FILES = """
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], ARGV[1], ARGV[2])) do
  found[#found + 1] = id
  found[#found + 1] = redis.call('GET', KEYS[1] .. id) or ''
end
return found
"""

# KEYS and ARGV as in FILES. Returns id, state and cancellation in turn; missing values are empty.
BATCHES = """
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], ARGV[1], ARGV[2])) do
  found[#found + 1] = id
  found[#found + 1] = redis.call('HGET', KEYS[1] .. id, 'state') or ''
  found[#found + 1] = redis.call('HGET', KEYS[1] .. id, 'cancel') or ''
end
return found
"""

# KEYS: batch, ids of the tenant's batches, open batches. ARGV: id, state, TTL in ms, name among the open batches.
CREATE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('HSET', KEYS[1], 'state', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('ZADD', KEYS[3], now, ARGV[4])
"""

# KEYS: batch. Adds a holder, after which holders with earlier numbers cannot write. Returns state and number.
HOLD = """
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {} end
return {state, redis.call('HINCRBY', KEYS[1], 'fence', 1)}
"""

# KEYS: batch, open batches. ARGV: the holder's number, state, TTL in ms, name among the open ones if it has ended.
SAVE = """
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 'lost' end
redis.call('HSET', KEYS[1], 'state', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if ARGV[4] ~= '' then redis.call('ZREM', KEYS[2], ARGV[4]) end
return 'saved'
"""

# KEYS: batch. Returns 1 if it exists.
CANCEL = """
if not redis.call('HGET', KEYS[1], 'state') then return 0 end
redis.call('HSET', KEYS[1], 'cancel', 1)
return 1
"""

# KEYS: batch, shard of rows, sizes, rows. ARGV: the holder's number, row, field of the piece, piece, mark of the whole
# row with its last piece or empty, the row's bytes, id of these rows among the sizes, most bytes, TTL in ms.
ROW = """
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 'lost' end
if redis.call('HGET', KEYS[2], ARGV[2]) then return 'there' end
if ARGV[5] ~= '' then
  local size = tonumber(ARGV[6])
  if tonumber(redis.call('HGET', KEYS[3], '') or 0) + size > tonumber(ARGV[8]) then return 'full' end
  redis.call('HINCRBY', KEYS[3], ARGV[7], size)
  redis.call('HINCRBY', KEYS[3], '', size)
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[4], time[1] * 1000000 + time[2], ARGV[7])
  for _, key in ipairs({KEYS[3], KEYS[4]}) do redis.call('PEXPIRE', key, ARGV[9] + 86400000) end
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[5])
end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[9])
return 'written'
"""
