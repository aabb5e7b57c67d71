-- Record a worker's heartbeat; return how many episodes it has claimed, and which of those that it names are no longer needed.
--
-- ARGV     1 worker, 2 its session, 3 msgpack of the tokens of its episodes, 4 of their attempts (both empty: none are named)
-- Returns  {draining 0|1, claims of the worker, token ...}: episodes to cancel
-- Invariant  orders are derived from the claims, so a lost reply is repeated.
local worker, session = ARGV[1], ARGV[2]
local limits, now, orders = read_limits(), now_ms(), {0, 0}
if limits then
  enter(worker, session, limits, now)
  sweep(limits, now)
  if limits.paused == '1' then orders[1] = 1 end
end
local claims = claims_key(worker)
orders[2] = redis.call('HLEN', claims)
if ARGV[3] == '' then return orders end
-- Read whole: a lookup in a hash of up to 512 fields scans it.
local flat, claimed = redis.call('HGETALL', claims), {}
for i = 1, #flat, 2 do claimed[flat[i]] = flat[i + 1] end
local tokens, attempts = cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4])
for i, token in ipairs(tokens) do
  local claim, attempt = claimed[token], attempts[i] .. ':'
  if not claim or string.sub(claim, 1, #attempt) ~= attempt then orders[#orders + 1] = token end
end
return orders
