-- Keep a complete group's score under a key, or that it is skipped.
--
-- ARGV     1 scorer, 2 key of the score, 3 number of the group, 4 score, 5 field to keep it in: the key, or the skipped mark
-- Returns  1, or 0 if the group was acknowledged or dropped meanwhile, or another scorer was faster
-- Invariants  a score is kept once, and only beside its group's trajectories.
local scorer, key, number, score, field = unpack(ARGV)
local blobs = blobs_key('t:' .. number)
if redis.call('EXISTS', blobs) == 0 then return 0 end
local kept = redis.call('HSETNX', blobs, field, score)
redis.call('HDEL', blobs, '?' .. key)
redis.call('XADD', SCORED, 'MAXLEN', '~', BELL_KEPT, '*', 'n', number, 'k', key, 's', scorer)
return kept
