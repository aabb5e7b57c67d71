-- Record a worker's heartbeat and return which of its episodes are no longer needed.
--
-- ARGV     1 worker, 2 its session, 3... its episodes: token, attempt, ...
-- Returns  {draining 0|1, token ...}: episodes to cancel
-- Invariant  orders are derived from the claims, so a lost reply is repeated.
local worker, session = ARGV[1], ARGV[2]
local limits, now, orders = read_limits(), now_ms(), {0}
if limits then
  enter(worker, session, limits, now)
  sweep(limits, now)
  if limits.paused == '1' then orders[1] = 1 end
end
for i = 3, #ARGV, 2 do
  local held = redis.call('HGET', claims_key(worker), ARGV[i])
  if not held or string.match(held, '^%d+') ~= ARGV[i + 1] then orders[#orders + 1] = ARGV[i] end
end
return orders
