-- Request changed settings before batch `step`, applied by `adopt` of that step.
--
-- ARGV     1 epoch, 2 step (0-based), 3 change, 4 `lost`: only if no earlier request is known
-- Returns  1, or 0 if nothing was requested; FENCED
-- Invariants  one change a step at most, and none for a step whose weights are published: a learner that repeats steps after
--          a crash finds the first decision.
local epoch, step, change, only_if = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
if is_fenced(epoch) then return fenced_reply(epoch) end
local decided = tonumber(redis.call('HGET', LEDGER, 'decided') or nil)
local published = tonumber(redis.call('HGET', PROGRESS, 'version') or nil) or 0
if step < published or (decided and (only_if == 'lost' or step <= decided)) then return 0 end
redis.call('HSET', LEDGER, 'decided', step)
redis.call('RPUSH', CHANGES, change)
local told = cjson.decode(change)
redis.call('XADD', HISTORY, 'MAXLEN', '~', 1000, '*', 'e', 'asked', 'd', cjson.encode({values = told.values, why = told.why}))
return 1
