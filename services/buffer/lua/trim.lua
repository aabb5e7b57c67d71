-- Forget events of groups that are durable in the ledger on disk, but for the newest.
--
-- ARGV     1 id and 2 ordinal of the newest event that is
-- Returns  how many were forgotten
-- Invariants  no event after that one is forgotten; nothing is, if this Redis does not hold that event (it lost data since).
local id, ordinal = ARGV[1], ARGV[2]
local newest = redis.call('XRANGE', LIFE, id, id)[1]
if not newest or newest[2][8] ~= ordinal then return 0 end
local was_behind = is_ledger_behind()
local uncopied = math.max(tonumber(redis.call('HGET', LEDGER, 'events') or 0) - ordinal, 0)
local forgotten = redis.call('XTRIM', LIFE, 'MAXLEN', string.format('%.0f', LIFE_KEPT + uncopied))
if was_behind and not is_ledger_behind() then ring('copied') end
return forgotten
