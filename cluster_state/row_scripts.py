"""The Lua of the block index, as `redis_scripts` says.

Block hashes travel as one string of 16 bytes each. Where memory is full, rows that are there live on; new ones are
refused.
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
