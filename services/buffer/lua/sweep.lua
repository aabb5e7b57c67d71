-- Housekeeping before every claim and heartbeat: dead workers and expired groups.

-- The observed clock advances with Redis's, but by a quarter of the worker timeout at most from one sweep to the next:
-- an outage of Redis does not time workers out.
local function observed_clock(limits, now)
  local clock, swept = unpack(redis.call('HMGET', LEDGER, 'clock', 'swept'))
  local passed = math.min(now - (swept or now), limits.worker_timeout_s * 250)
  clock = (clock or 0) + math.max(passed, 0)
  redis.call('HSET', LEDGER, 'clock', clock, 'swept', now)
  return clock
end

local function reap(limits, now)
  local deadline = observed_clock(limits, now) - limits.worker_timeout_s * 1000
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', WORKERS, '-inf', '(' .. deadline)) do
    forget_worker(worker)
    give_back_all(worker, limits, 'worker_died', now)
  end
end

-- Oldest version in a group: of submitted members, and of running ones at their claim.
local function oldest_version(unit)
  local meta, oldest = meta_key(unit), nil
  for i = 0, redis.call('HGET', meta, 'members') - 1 do
    local submitted, claimed = unpack(redis.call('HMGET', meta, 's' .. i, 'c' .. i))
    local version = tonumber(submitted or claimed or nil)
    if version and (not oldest or version < oldest) then oldest = version end
  end
  return oldest
end

-- Drop groups that no step within the staleness bound can consume any more. Runs once per published step.
local function expire(limits, step)
  if limits.stale_policy ~= 'drop' or redis.call('HGET', LEDGER, 'expired_at') == tostring(step) then return end
  redis.call('HSET', LEDGER, 'expired_at', step)
  local bound = oldest_consumable(limits, step)
  for _, number in ipairs(redis.call('ZRANGEBYSCORE', ASSEMBLING, '-inf', '(' .. bound)) do
    local unit = 't:' .. number
    local oldest = oldest_version(unit)
    if oldest and oldest < bound then
      end_group(unit, redis.call('HGET', meta_key(unit), 'members'), 'dropped', 'expired')
    end
  end
end

-- Versions never fall as numbers rise (take.lua), also after the step went back.
local function lower_versions(step)
  for _, number in ipairs(redis.call('ZRANGEBYSCORE', ASSEMBLING, '(' .. step, '+inf')) do
    redis.call('ZADD', ASSEMBLING, step, number)
  end
end

-- Returns the step of the announced weights, or nil before the first.
local function sweep(limits, now)
  reap(limits, now)
  local step = tonumber(redis.call('HGET', PROGRESS, 'step') or nil)
  if step then
    expire(limits, step)
    lower_versions(step)
  end
  return step
end

-- Register a worker. A new session under an old name is a new process: claims of the old one are requeued.
local function enter(worker, session, limits, now)
  local known = redis.call('HGET', worker_key(worker), 'session')
  if known ~= session then
    if known then give_back_all(worker, limits, 'worker_died', now) end
    redis.call('DEL', worker_key(worker))
    redis.call('HSET', worker_key(worker), 'session', session)
  end
  redis.call('ZADD', WORKERS, redis.call('HGET', LEDGER, 'clock') or 0, worker)
end
