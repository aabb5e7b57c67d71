-- Closes a model to further commands, unless its next one is queued. Drops later ones, whose predecessor never came.
-- KEYS: log, applied, closed, inflight, queued_bytes, open models of the owner, shared passes, hashes that expire
-- ARGV: model id, owner, expiry of the hashes (s)
-- Returns 1 if it is closed, 0 if its next command is to be applied.
local applied = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or -1)
if redis.call('HEXISTS', KEYS[1], applied + 1) == 1 then return 0 end
for _, seq in ipairs(redis.call('HKEYS', KEYS[1])) do
  if tonumber(seq) > applied then
    local size = redis.call('HSTRLEN', KEYS[1], seq)
    if redis.call('HINCRBY', KEYS[5], ARGV[2], -size) <= 0 then redis.call('HDEL', KEYS[5], ARGV[2]) end
  end
end
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[6], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[7])
redis.call('HDEL', KEYS[4], ARGV[1])
for i = 8, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return 1
