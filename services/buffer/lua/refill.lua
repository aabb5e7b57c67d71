-- Replace a group whose step trains another one in its place. It counts as dropped, but stays in the stream until the step's
-- checkpoint is durable, so that a learner that repeats the step meets it again.
--
-- ARGV     1 epoch, 2 step that the batch leads to, 3 reason, 4 entry id
-- Returns  1, or 0 when the entry is gone; FENCED
-- Invariants  a refilled group is not counted against the staleness bound; repeating it changes nothing.
local epoch, step, reason, id = unpack(ARGV)
if is_fenced(epoch) then return fenced_reply(epoch) end
local entry = redis.call('XRANGE', STREAM, id, id)[1]
if not entry then return 0 end
mark_refilled(entry[2][2], step, id, reason)
ring('refilled')
return 1
