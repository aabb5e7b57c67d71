-- Deliver the next group to the learner: first those that were delivered before and not acknowledged, in stream order.
--
-- ARGV     1 epoch, 2 entry id that this learner saw last (0-0: none)
-- Returns  {entry id, number, version at admission, {member, blob, ...}, temperature or nothing}, or nil when there is none; FENCED
-- Invariants  the same arguments give the same entry until it is acknowledged or dropped, so an answer that got lost is
--          asked for again; a learner that was replaced takes nothing.
local epoch, last = ARGV[1], ARGV[2]
if is_fenced(epoch) then return fenced_reply(epoch) end
if redis.call('EXISTS', STREAM) == 0 then return nil end

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
if not entry then return nil end
local number, version, temperature = entry[2][2], entry[2][4], entry[2][6]
return {
  entry[1], tonumber(number), tonumber(version), redis.call('HGETALL', blobs_key('t:' .. number)), temperature or '',
}
