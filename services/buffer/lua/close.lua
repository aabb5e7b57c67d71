-- Drop what a finished run has no use for: a group that Redis, having lost data, holds open again.
--
-- ARGV     1 epoch, 2 reason
-- Returns  how many groups; FENCED
-- Invariants  afterwards no group is in flight; the identity of the ledger holds.
local epoch, reason = ARGV[1], ARGV[2]
if is_fenced(epoch) then return fenced_reply(epoch) end
local count = 0
for _, number in ipairs(redis.call('HKEYS', REFILLED)) do unmark_refilled(number) end
for _, number in ipairs(redis.call('ZRANGE', ASSEMBLING, 0, -1)) do
  local unit = 't:' .. number
  end_group(unit, redis.call('HGET', meta_key(unit), 'members'), 'dropped', reason)
  count = count + 1
end
for _, entry in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do
  redis.call('XACK', STREAM, LEARNER, entry[1])
  redis.call('XDEL', STREAM, entry[1])
  redis.call('DEL', blobs_key('t:' .. entry[2][2]))
  count_out(entry[2][2], 'dropped', reason)
  count = count + 1
end
return count
