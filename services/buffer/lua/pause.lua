-- Stop handing out episodes, or go on.
--
-- ARGV     1 or 0
-- Returns  1 if that is a change
if (redis.call('HGET', LIMITS, 'paused') or '0') == ARGV[1] then return 0 end
redis.call('HSET', LIMITS, 'paused', ARGV[1])
ring('pause')
return 1
