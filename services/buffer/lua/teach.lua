-- What the task sampler knows now; workers draw by it from here on.
--
-- ARGV     1 epoch, 2 state (JSON)
-- Returns  1; FENCED
local epoch, state = ARGV[1], ARGV[2]
if is_fenced(epoch) then return fenced_reply(epoch) end
redis.call('SET', SAMPLER, state)
return 1
