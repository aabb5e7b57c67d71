-- Pause or resume claiming.
--
-- ARGV     1 or 0
-- Returns  1 if the state changed
if (redis.call('HGET', LIMITS, 'paused') or '0') == ARGV[1] then return 0 end
redis.call('HSET', LIMITS, 'paused', ARGV[1])
ring('pause')
return 1
