-- Claim the oldest complete group without a score under a key, or renew the claim of one.
--
-- ARGV     1 scorer, 2 key of the score, 3 milliseconds until others may claim the group, 4 number of a group to renew the
--          claim of (empty: claim), 5 field that marks a group as skipped: the key, or one of the key and a selection
-- Returns  claim: how many groups are known to have no such score, claimed ones included, and of the one that was claimed, if any: number,
--          entry id, version at admission, temperature or nothing, msgpack of {member, blob, +member, addition, ...}. Renewal:
--          1, or 0 if the group is gone or another's.
-- Invariants  a scorer gets the group that it holds again, unless an older one became free, so a lost reply can be requested
--          again and a restarted scorer continues; claims and scores go with their group's trajectories, so none outlives it;
--          an entry is examined once per field, so the cost does not grow with the scored groups that wait for a checkpoint.
local scorer, key, lease_ms, renewed, skipped = unpack(ARGV)
local now = now_ms()
local mark = '?' .. key

local function holder(blobs)
  local claim = redis.call('HGET', blobs, mark)
  if not claim then return nil, 0 end
  local at, name = string.match(claim, '^(%d+) (.*)$')
  return name, tonumber(at)
end

local function hold(blobs) redis.call('HSET', blobs, mark, string.format('%.0f %s', now + lease_ms, scorer)) end

if renewed ~= '' then
  local blobs = blobs_key('t:' .. renewed)
  if holder(blobs) ~= scorer then return 0 end
  hold(blobs)
  return 1
end

local UNSCORED = unscored_key(skipped)
local EXAMINED, LOOKED_AT = 1000, 16 -- entries per XRANGE, ids per ZRANGE

local function needs_score(entry)
  local number = entry[2][2]
  local blobs = blobs_key('t:' .. number)
  return entry[2][7] ~= 'lost' and redis.call('HEXISTS', REFILLED, number) == 0
    and redis.call('HEXISTS', blobs, key) == 0 and redis.call('HEXISTS', blobs, skipped) == 0
    and redis.call('EXISTS', blobs) == 1
end

-- Note what is new in the stream, in its order; true if there may be more.
local function examine()
  local after = redis.call('HGET', SCANNED, skipped)
  local entries = redis.call('XRANGE', STREAM, after and '(' .. after or '-', '+', 'COUNT', EXAMINED)
  for _, entry in ipairs(entries) do
    if needs_score(entry) then
      local ms, sequence = string.match(entry[1], '^(%d+)-(%d+)$')
      redis.call('ZADD', UNSCORED, string.format('%.0f', ms * 2048 + math.min(sequence, 2047)), entry[1]) -- below 2^53
    end
  end
  if #entries > 0 then redis.call('HSET', SCANNED, skipped, entries[#entries][1]) end
  return #entries == EXAMINED
end

-- The oldest group that is this scorer's or free. Those that are scored or gone are forgotten, each once.
local function find()
  local passed = 0 -- held by others
  while true do
    local ids = redis.call('ZRANGE', UNSCORED, passed, passed + LOOKED_AT - 1)
    if #ids == 0 then return nil end
    for _, id in ipairs(ids) do
      local entry = redis.call('XRANGE', STREAM, id, id)[1]
      if entry and needs_score(entry) then
        local name, at = holder(blobs_key('t:' .. entry[2][2]))
        if name == scorer or at < now then return entry end
        passed = passed + 1
      else
        redis.call('ZREM', UNSCORED, id)
      end
    end
  end
end

local entry
repeat
  local is_more = examine()
  entry = find()
until entry or not is_more
local num_missing = redis.call('ZCARD', UNSCORED)
if not entry then return {num_missing} end
local number, version, temperature = entry[2][2], entry[2][4], entry[2][6]
local blobs, members = blobs_key('t:' .. number), {}
hold(blobs)
local flat = redis.call('HGETALL', blobs)
for i = 1, #flat, 2 do
  if string.match(flat[i], '^%+?%d+$') then members[#members + 1], members[#members + 2] = flat[i], flat[i + 1] end
end
return {num_missing, tonumber(number), entry[1], tonumber(version), temperature or '', cmsgpack.pack(members)}
