-- Deliver the next groups to the learner: first those that were delivered before and not acknowledged, in stream order.
--
-- ARGV     1 epoch, 2 last entry id delivered to this learner (0-0: none), 3 maximum number
-- Returns  {entry id, number, version at admission, temperature or nothing, msgpack of {member, blob, ...}, 1 if Redis has
--          lost its trajectories} ..., or when there
--          is none the lowest number of the active groups, -1 without any; FENCED
-- Invariants  the same arguments give the same first entry until it is acknowledged or dropped, and no entry is passed over,
--          so a lost reply can be requested again; a replaced learner takes nothing.
local epoch, last, count = unpack(ARGV)
if is_fenced(epoch) then return fenced_reply(epoch) end

local function list_lowest()
  local lowest = -1
  for _, number in ipairs(redis.call('ZRANGE', ASSEMBLING, 0, -1)) do
    number = tonumber(number)
    if lowest < 0 or number < lowest then lowest = number end
  end
  return lowest
end

local MAX_PASSED = 2000 -- numbers per call; more cost more than listing the groups that play

-- Numbers are given out in order, once, so the lowest one never falls: each is passed over once in the run's life.
local function lowest_being_played()
  if redis.call('ZCARD', ASSEMBLING) == 0 then return -1 end
  local known, next_number = unpack(redis.call('HMGET', LEDGER, 'lowest', 'next'))
  local lowest = tonumber(known or nil) or list_lowest()
  local last = math.min(tonumber(next_number or 0), lowest + MAX_PASSED)
  while lowest < last and not redis.call('ZSCORE', ASSEMBLING, lowest) do lowest = lowest + 1 end
  if not redis.call('ZSCORE', ASSEMBLING, lowest) then lowest = list_lowest() end
  if tostring(lowest) ~= known then redis.call('HSET', LEDGER, 'lowest', lowest) end
  return lowest
end

if redis.call('EXISTS', STREAM) == 0 then return lowest_being_played() end

local function read(after)
  local streams = redis.call('XREADGROUP', 'GROUP', LEARNER, LEARNER, 'COUNT', count, 'STREAMS', STREAM, after)
  local whole, hollow = {}, false
  for _, entry in ipairs(streams and streams[1][2] or {}) do
    if entry[2] then
      whole[#whole + 1] = entry
    else -- pending, but taken out of the stream by hand
      redis.call('XACK', STREAM, LEARNER, entry[1])
      hollow = true
    end
  end
  if hollow and #whole == 0 then return read(after) end
  return whole
end

local entries = read(last)
if #entries == 0 then entries = read('>') end
if #entries == 0 then return lowest_being_played() end
local reply = {}
for i, entry in ipairs(entries) do
  local number, version, temperature = entry[2][2], entry[2][4], entry[2][6]
  local blobs = cmsgpack.pack(redis.call('HGETALL', blobs_key('t:' .. number)))
  local is_lost = entry[2][7] == 'lost' and 1 or 0
  reply[i] = {entry[1], tonumber(number), tonumber(version), temperature or '', blobs, is_lost}
end
return reply
