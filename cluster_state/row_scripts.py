"""Lua scripts of the block index in Redis or Valkey, run by `redis_store`.

Block hashes are passed as one string with 16 bytes each, rows (`protocol.index_rows`) as one with 17 bytes and a name
each. If memory is full, existing rows are renewed and new ones refused."""

# Each command of a script costs the server a microsecond or more, so one command handles all consecutive rows of a key.
# A row's name is a node's id, its `index.on_tier` (under the node's lease), or `index.ON_STORE`. In the key of a group
# (`protocol.index_rows`) the block's tag precedes the name. The name follows each row in the argument, so that a field
# is one substring of it: creating strings takes most of the script's time.
_ROWS = """
local call, sub, byte = redis.call, string.sub, string.byte
local id, epoch = ARGV[1], ARGV[2]
local function each(rows, visit)
  local last = 16 + #id
  local key, leader, fields, count
  for at = 1, #rows, last + 1 do
    local group = byte(rows, at) > 0 and sub(rows, at + 1, at + 8)
    if not group or group ~= leader or count == 512 then
      if key then visit(key, fields) end
      key = group and KEYS[2] .. group or KEYS[1] .. sub(rows, at + 1, at + 16)
      leader, fields, count = group, {}, 0
    end
    count = count + 1
    fields[count] = group and sub(rows, at + 9, at + last) or id
  end
  if key then visit(key, fields) end
end
local function those(key, fields, wanted)
  local found, epochs = {}, call('HMGET', key, unpack(fields))
  for at, field in ipairs(fields) do
    if wanted(epochs[at]) then found[#found + 1] = field end
  end
  return found
end
local function own(other) return other == epoch end
"""

# A registered epoch (nearly all writers have one) writes rows without reading them first: rows of the node's other
# epochs are void. If memory is full and the write is refused, it reads them, and existing rows are renewed. Nothing may
# be written before that, because Redis refuses no further write to a script that has already written.
_CHANGES = (
    _ROWS
    + """
local ttl_ms = ARGV[3]
local function owner(name) return string.match(name, '^(.-)\\31') or name end
local registered = call('HGET', KEYS[3], owner(id)) == epoch
local function older(other)
  return not other or other ~= epoch and (registered or tonumber(other) < tonumber(epoch))
end
local function write(how, key, fields)
  local words = {}
  for at, field in ipairs(fields) do words[2 * at - 1], words[2 * at] = field, epoch end
  return how('HSET', key, unpack(words))
end
local function store(key, fields)
  if not registered or type(write(redis.pcall, key, fields)) == 'table' then
    fields = those(key, fields, older)
    if #fields > 0 then write(call, key, fields) end
  end
  call('PEXPIRE', key, ttl_ms)
end
local function remove(key, fields)
  if not registered then fields = those(key, fields, own) end
  if #fields > 0 then call('HDEL', key, unpack(fields)) end
end
"""
)

# KEYS: prefix of single rows, prefix of groups, members. ARGV: node id, epoch, TTL in ms, rows stored, rows removed.
PUBLISH = (
    _CHANGES
    + """
each(ARGV[5], remove)
each(ARGV[4], store)
"""
)

# KEYS: those of PUBLISH, and prefix of leases. ARGV: node id, epoch, TTL in ms, rows. A key may have tens of thousands
# of fields, so only a random sample is checked, which grows with the number of rows written.
REFRESH = (
    _CHANGES
    + """
local epochs = {['\\31store'] = 0}
local function least(name)
  if not epochs[name] then
    local live = call('EXISTS', KEYS[4] .. owner(name)) == 1
    epochs[name] = live and tonumber(call('HGET', KEYS[3], owner(name))) or name == id and 0 or math.huge
  end
  return epochs[name]
end
each(ARGV[4], function(key, fields)
  store(key, fields)
  local tagged, void = sub(key, 1, #KEYS[2]) == KEYS[2], {}
  local some = call('HRANDFIELD', key, math.max(64, 8 * #fields), 'WITHVALUES')
  for at = 1, #some, 2 do
    local name = tagged and sub(some[at], 9) or some[at]
    if tonumber(some[at + 1]) < least(name) then void[#void + 1] = some[at] end
  end
  if #void > 0 then call('HDEL', key, unpack(void)) end
end)
"""
)

# KEYS: prefix of single rows, prefix of groups. ARGV: node id, epoch, rows. Returns how many of them are present.
PRESENT = (
    _ROWS
    + """
local found = 0
each(ARGV[3], function(key, fields) found = found + #those(key, fields, own) end)
return found
"""
)

# KEYS: prefix of single rows, prefix of groups. ARGV: rows without names, then names. Returns for each row the epoch
# that each name has there, or nothing.
HOLDERS = """
local sub, answers = string.sub, {}
for at = 1, #ARGV[1], 17 do
  local key, tag, fields = KEYS[2] .. sub(ARGV[1], at + 1, at + 8), sub(ARGV[1], at + 9, at + 16), {}
  if string.byte(ARGV[1], at) == 0 then key, tag = KEYS[1] .. sub(ARGV[1], at + 1, at + 16), '' end
  for place = 2, #ARGV do fields[place - 1] = tag .. ARGV[place] end
  answers[#answers + 1] = redis.call('HMGET', key, unpack(fields))
end
return answers
"""

# KEYS: prefix of single rows, prefix of groups. ARGV: name of the store; then for each query the hashes of a chain, and
# the hashes that stand for the store's groups (empty unless the store is queried). Returns for each query id, epoch and
# length of each node that holds the first block. The caller checks which epochs are live, since sending a thousand of
# them would cost more than the search. The search per node is that of `prefix_search.longest`, with positions
# counted from 1; nodes with the same next position share a lookup. `protocol.index_rows` defines the key of a row.
LONGEST_PREFIX = """
local call, sub, answers = redis.call, string.sub, {}
local hashes, chained, epochs, answer
local function part(i, bytes) return sub(hashes, 16 * i - 15, 16 * i - 16 + bytes) end
local function ask(ids, i)
  local key, fields, holding, others = KEYS[1] .. part(i, 16), ids, {}, {}
  if chained then
    local tag = part(i, 8)
    key, fields = KEYS[2] .. part(i - (i - 2) % 16, 8), {}
    for at, id in ipairs(ids) do fields[at] = tag .. id end
  end
  for at, epoch in ipairs(call('HMGET', key, unpack(fields))) do
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
  hashes, chained, epochs, answer = ARGV[at], true, {}, {}
  local first = call('HGETALL', KEYS[1] .. part(1, 16))
  for place = 1, #first, 2 do
    ids[#ids + 1] = first[place]
    epochs[first[place]] = first[place + 1]
  end
  search(ids)
  hashes, chained = ARGV[at + 1], false
  if hashes ~= '' then
    epochs[store] = call('HGET', KEYS[1] .. part(1, 16), store)
    if epochs[store] then search({store}) end
  end
  answers[#answers + 1] = answer
end
return answers
"""
