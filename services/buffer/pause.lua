-- Stop handing out episodes, or go on.
--
-- ARGV     1 or 0
-- Returns  OK
redis.call('HSET', LIMITS, 'paused', ARGV[1])
ring('pause')
return redis.status_reply('OK')
