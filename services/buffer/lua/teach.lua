-- Set the task sampler's state, used by draws from now on.
--
-- ARGV     1 epoch, 2 state (JSON)
-- Returns  1; FENCED
local epoch, state = ARGV[1], ARGV[2]
if is_fenced(epoch) then return fenced_reply(epoch) end
redis.call('SET', SAMPLER, state)
return 1
