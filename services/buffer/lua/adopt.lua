-- Apply requested changes of settings before optimizer batch `step`.
--
-- ARGV     1 epoch, 2 step (0-based), 3 number of changes whose adoption the learner knows
-- Returns  {1 if the run is paused, desired state of the run, {later change, step from which on it holds, ...}}; FENCED
-- Invariants  a change is adopted once, and never for a batch whose weights are published already: a learner that repeats
--          steps after a crash repeats them under the settings of the first time. Admission follows in the same moment.
local epoch, step, first = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if is_fenced(epoch) then return fenced_reply(epoch) end
local from = math.max(step, tonumber(redis.call('HGET', PROGRESS, 'version') or nil) or 0)
local reply, adopted = {}, false
for place, change in ipairs(redis.call('LRANGE', CHANGES, first, -1)) do
  place = first + place - 1
  adopted = adopt_change(place, change, from) or adopted
  reply[#reply + 1] = change
  reply[#reply + 1] = tonumber(redis.call('HGET', ADOPTED, place))
end
if adopted then ring('settings') end
local paused, wanted = redis.call('HGET', LIMITS, 'paused'), redis.call('HGET', RECORD, 'wanted')
return {paused == '1' and 1 or 0, wanted or '', reply}
