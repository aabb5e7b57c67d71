-- Trajectories of an evaluation whose episodes are all submitted or failed.
--
-- ARGV     1 unit
-- Returns  {member, blob, ...}; nil before; error UNKNOWN when there is no such evaluation
local unit = ARGV[1]
local members, done, failed = unpack(redis.call('HMGET', meta_key(unit), 'members', 'done', 'failed'))
if not members then return redis.error_reply('UNKNOWN evaluation ' .. string.sub(unit, 3)) end
if done + failed < tonumber(members) then return nil end
return redis.call('HGETALL', blobs_key(unit))
