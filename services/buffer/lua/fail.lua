-- Record a failed episode: requeue it with the same member number (so the same seed), or fail it for good.
--
-- ARGV     1 worker, 2 unit, 3 member, 4 attempt, 5 reason
-- Returns  1, or 0 when the worker does not hold that attempt any more (then nothing changes)
-- Invariants  a member is tried max_attempts times at most; a group that has fewer than `size` members left that could
--          still come is failed whole, under this reason.
local worker, unit, index, attempt, reason = unpack(ARGV)
touch(worker)
local held = redis.call('HGET', claims_key(worker), unit .. ':' .. index)
if not held or string.match(held, '^%d+') ~= attempt then return 0 end
give_back(unit, index, worker, read_limits(), reason, now_ms())
ring('requeue')
return 1
