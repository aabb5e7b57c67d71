-- Hand out episodes: evaluations first, then what was given back, then members of groups, admitting new ones as needed.
--
-- ARGV     1 worker, 2 its session, 3 nonce, 4 how many at most
-- Returns  {doorbell position, {unit, member, attempt, min_version, sampling, temperature or nothing} ...}
-- Invariants  C3: a group is admitted only while admitted - dropped - failed is below
--          min((step + max_staleness + 1) * groups_per_step, total_groups), fewer than max_groups_in_flight are being
--          played, and weights are published. The same nonce again gives the same episodes and admits nothing, so a
--          caller that did not hear the answer asks again.
local worker, session, nonce, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local RETRY_ELSEWHERE_MS = 5000
local reply = {}

local function hand_out(token, unit, index, attempts, version)
  attempts = attempts or '0'
  redis.call('HSET', meta_key(unit), 'o' .. index, worker, 'c' .. index, version)
  redis.call('HSET', claims_key(worker), token, attempts .. ':' .. nonce)
  reply[#reply + 1] = {unit, tonumber(index), tonumber(attempts), tonumber(version), false}
end

local function add_sampling()
  for _, row in ipairs(reply) do
    local sampling, temperature, members, baselines =
      unpack(redis.call('HMGET', meta_key(row[1]), 'sampling', 'temperature', 'members', 'baselines'))
    if is_baseline(row[2], members, baselines) then sampling, temperature = 'greedy', nil end
    row[5], row[6] = sampling, temperature or ''
  end
end

-- An episode goes to another worker than the one that just failed it, if there is one to take it in time.
local function belongs_elsewhere(failed_by, now)
  if not failed_by then return false end
  local who, at = string.match(failed_by, '^(.*) (%d+)$')
  return who == worker and now - at < RETRY_ELSEWHERE_MS and redis.call('ZCARD', WORKERS) > 1
end

local function take_from(queue, step, now, aside)
  while #reply < limit do
    local token = redis.call('LPOP', queue)
    if not token then return end
    local unit, index = split_token(token)
    local attempts, failed_by, version =
      unpack(redis.call('HMGET', meta_key(unit), 'a' .. index, 'x' .. index, 'version'))
    if belongs_elsewhere(failed_by, now) then
      aside[#aside + 1] = {queue, token}
    else
      if is_group(unit) then version = step end
      hand_out(token, unit, index, attempts, version)
    end
  end
end

local function can_admit(limits, step)
  local admitted, dropped, failed = unpack(redis.call('HMGET', LEDGER, 'admitted', 'dropped', 'failed'))
  local standing = (admitted or 0) - (dropped or 0) - (failed or 0)
  local lookahead = (step + limits.max_staleness + 1) * limits.groups_per_step
  return standing < lookahead and standing < tonumber(limits.total_groups)
    and redis.call('ZCARD', ASSEMBLING) < tonumber(limits.max_groups_in_flight)
end

local function admit(limits, step)
  local number = redis.call('HINCRBY', LEDGER, 'next', 1) - 1
  local unit, baselines = 't:' .. number, limits.baselines or 0
  local members = limits.group_size + limits.redundancy + baselines
  redis.call('HINCRBY', LEDGER, 'admitted', 1)
  redis.call('HSET', meta_key(unit), 'size', limits.group_size + baselines, 'members', members, 'baselines', baselines,
    'greedy', 0, 'done', 0, 'failed', 0, 'version', step, 'sampling', 'train')
  if limits.temperature then redis.call('HSET', meta_key(unit), 'temperature', limits.temperature) end
  redis.call('ZADD', ASSEMBLING, step, number)
  for i = 0, members - 1 do redis.call('RPUSH', QUEUE_TRAIN, unit .. ':' .. i) end
  record(number, 'admitted', step)
end

local function claim_new(limits, step, now)
  local aside, admitted = {}, false
  take_from(QUEUE_EVAL, step, now, aside)
  -- Given-back members of groups can exist only once weights are published, so `step` is there when it is read.
  take_from(QUEUE_TRAIN, step, now, aside)
  while step and #reply < limit and can_admit(limits, step) do
    admit(limits, step)
    admitted = true
    take_from(QUEUE_TRAIN, step, now, aside)
  end
  for i = #aside, 1, -1 do redis.call('LPUSH', aside[i][1], aside[i][2]) end
  if admitted and redis.call('LLEN', QUEUE_TRAIN) > 0 then ring('admit') end
end

local function claim_again()
  local flat = redis.call('HGETALL', claims_key(worker))
  for i = 1, #flat, 2 do
    local attempt, given = string.match(flat[i + 1], '^(%d+):(.*)$')
    if given == nonce then
      local unit, index = split_token(flat[i])
      local version = redis.call('HGET', meta_key(unit), 'c' .. index)
      reply[#reply + 1] = {unit, tonumber(index), tonumber(attempt), tonumber(version), false}
    end
  end
end

local limits, now = read_limits(), now_ms()
if limits then
  enter(worker, session, limits, now)
  local step = sweep(limits, now)
  if redis.call('HGET', worker_key(worker), 'nonce') == nonce then
    claim_again()
  elseif limits.paused ~= '1' then
    redis.call('HSET', worker_key(worker), 'nonce', nonce)
    claim_new(limits, step, now)
  end
  add_sampling()
end
local newest = redis.call('XREVRANGE', DOORBELL, '+', '-', 'COUNT', 1)
return {newest[1] and newest[1][1] or '0-0', reply}
