-- Remove an evaluation; episodes of it that are still played are cancelled.
--
-- ARGV     1 epoch, 2 unit
-- Returns  1, or 0 when there was none; FENCED
local epoch, unit = ARGV[1], ARGV[2]
if is_fenced(epoch) then return fenced_reply(epoch) end
local members = redis.call('HGET', meta_key(unit), 'members')
if not members then return 0 end
vacate(unit, tonumber(members))
redis.call('DEL', meta_key(unit), blobs_key(unit))
return 1
