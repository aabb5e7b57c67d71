-- Adds a command to a model's log, once.
-- KEYS: log, applied, queued_bytes, wakeups, closed
-- ARGV: model id, sequence id, command, owner, most commands in the log that are not applied, most bytes of the owner
-- Returns 1 if added, 0 if known, -1 if the model has too many commands, -2 if the owner has too many bytes, -3 if the
-- model is closed.
local applied = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or -1)
local seq = tonumber(ARGV[2])
if seq <= applied or redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then return 0 end
if redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 then return -3 end
if seq - applied > tonumber(ARGV[5]) then return -1 end
local size = #ARGV[3]
local queued = tonumber(redis.call('HGET', KEYS[3], ARGV[4]) or 0)
if queued > 0 and queued + size > tonumber(ARGV[6]) then return -2 end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('HINCRBY', KEYS[3], ARGV[4], size)
redis.call('RPUSH', KEYS[4], ARGV[1])
return 1
