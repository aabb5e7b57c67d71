-- Deliver the next group to the learner: first those that were delivered before and not acknowledged, in stream order.
--
-- ARGV     1 epoch, 2 entry id that this learner saw last (0-0: none)
-- Returns  {entry id, number, version at admission, {member, blob, ...}, temperature or nothing}, or when there is none the
--          lowest number of those that are still being played, -1 for nobody; FENCED
-- Invariants  the same arguments give the same entry until it is acknowledged or dropped, so an answer that got lost is
--          asked for again; a learner that was replaced takes nothing.
local epoch, last = ARGV[1], ARGV[2]
if is_fenced(epoch) then return fenced_reply(epoch) end

-- Versions never fall as numbers rise, so the lowest number is among those of the lowest version.
local function lowest_being_played()
  local first = redis.call('ZRANGE', ASSEMBLING, 0, 0, 'WITHSCORES')
  local lowest = -1
  for _, number in ipairs(first[1] and redis.call('ZRANGEBYSCORE', ASSEMBLING, first[2], first[2]) or {}) do
    number = tonumber(number)
    if lowest < 0 or number < lowest then lowest = number end
  end
  return lowest
end

if redis.call('EXISTS', STREAM) == 0 then return lowest_being_played() end

local function read(after)
  local streams = redis.call('XREADGROUP', 'GROUP', LEARNER, LEARNER, 'COUNT', 1, 'STREAMS', STREAM, after)
  return streams and streams[1][2][1]
end

local entry = read(last)
while entry and not entry[2] do -- pending, but taken out of the stream by hand
  redis.call('XACK', STREAM, LEARNER, entry[1])
  entry = read(last)
end
entry = entry or read('>')
if not entry then return lowest_being_played() end
local number, version, temperature = entry[2][2], entry[2][4], entry[2][6]
return {
  entry[1], tonumber(number), tonumber(version), redis.call('HGETALL', blobs_key('t:' .. number)), temperature or '',
}
