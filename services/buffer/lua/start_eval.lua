-- Queue an evaluation's episodes, ahead of training.
--
-- ARGV     1 epoch, 2 unit, 3 how many, 4 sampling, 5 min_version
-- Returns  1, or 0 when the evaluation exists already; FENCED
local epoch, unit, members, sampling, version = unpack(ARGV)
if is_fenced(epoch) then return fenced_reply(epoch) end
if redis.call('EXISTS', meta_key(unit)) == 1 then return 0 end
redis.call('HSET', meta_key(unit), 'size', members, 'members', members, 'done', 0, 'failed', 0, 'version', version,
  'sampling', sampling)
for i = 0, members - 1 do redis.call('RPUSH', QUEUE_EVAL, unit .. ':' .. i) end
ring('eval')
return 1
