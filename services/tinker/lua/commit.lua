-- Records that a command is applied, with its result, once; a learner that has a successor commits nothing.
-- KEYS: epoch, log, applied, queued_bytes, result, done, discarded_folders, then a hash per record
-- ARGV: epoch, model id, sequence id, result, expiry in s, owner, request id, folder to discard (empty: none), then field
-- and value per record
-- Returns 1, or 0 if it was committed before, or -1 if a newer learner is at work.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
local applied = tonumber(redis.call('HGET', KEYS[3], ARGV[2]) or -1)
if tonumber(ARGV[3]) <= applied then return 0 end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
redis.call('SET', KEYS[5], ARGV[4], 'EX', ARGV[5])
for i = 8, #KEYS do
  redis.call('HSET', KEYS[i], ARGV[9 + 2 * (i - 8)], ARGV[10 + 2 * (i - 8)])
end
if ARGV[8] ~= '' then redis.call('SADD', KEYS[7], ARGV[8]) end
local size = redis.call('HSTRLEN', KEYS[2], ARGV[3])
if redis.call('HINCRBY', KEYS[4], ARGV[6], 0 - size) <= 0 then redis.call('HDEL', KEYS[4], ARGV[6]) end
redis.call('PUBLISH', KEYS[6], ARGV[7])
return 1
