-- Claim the oldest complete group without a score under a key, or renew the claim of one.
--
-- ARGV     1 scorer, 2 key of the score, 3 milliseconds until others may claim the group, 4 number of a group to renew the
--          claim of (empty: claim)
-- Returns  claim: how many groups have no such score, claimed ones included, and of the one that was claimed, if any: number,
--          entry id, version at admission, temperature or nothing, msgpack of {member, blob, ...}. Renewal: 1, or 0 if the
--          group is gone or another's.
-- Invariants  a scorer gets the group that it holds again, so a lost reply can be requested again and a restarted scorer
--          continues; claims and scores go with their group's trajectories, so none outlives it.
local scorer, key, lease_ms, renewed = unpack(ARGV)
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

local num_missing, own, free = 0, nil, nil
for _, entry in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do
  local blobs = blobs_key('t:' .. entry[2][2])
  local is_used = entry[2][7] ~= 'lost' and redis.call('HEXISTS', REFILLED, entry[2][2]) == 0
  if is_used and redis.call('HEXISTS', blobs, key) == 0 and redis.call('EXISTS', blobs) == 1 then
    num_missing = num_missing + 1
    local name, at = holder(blobs)
    if name == scorer then
      own = own or entry
    elseif at < now then
      free = free or entry
    end
  end
end
local entry = own or free
if not entry then return {num_missing} end
local number, version, temperature = entry[2][2], entry[2][4], entry[2][6]
local blobs, members = blobs_key('t:' .. number), {}
hold(blobs)
local flat = redis.call('HGETALL', blobs)
for i = 1, #flat, 2 do
  if string.match(flat[i], '^%d+$') then members[#members + 1], members[#members + 2] = flat[i], flat[i + 1] end
end
return {num_missing, tonumber(number), entry[1], tonumber(version), temperature or '', cmsgpack.pack(members)}
