-- Replaces or deletes a checkpoint's record, unless it has changed; the folder of a deleted one is to be removed.
-- KEYS: checkpoints, sizes of the owner's checkpoints, discarded folders
-- ARGV: path, record as it was read, new record or nothing to delete it, folder
-- Returns 1, or 0 if it has changed.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('SADD', KEYS[3], ARGV[4])
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
return 1
