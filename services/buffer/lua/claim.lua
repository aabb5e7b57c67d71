-- Hand out episodes: evaluations first, then what was given back and groups to score, then members of groups, admitting new
-- ones as needed.
--
-- ARGV     1 worker, 2 its session, 3 nonce, 4 how many at most, 5 of groups' members, 6 of evaluations
-- Returns  {doorbell position, msgpack of {unit, member, attempt, min_version, sampling, temperature or nothing} ..., or
--          nothing for none}
-- Invariants  C3: a group is admitted only while admitted - dropped - failed is below
--          min((step + max_staleness + 1) * groups_per_step, total_groups), fewer than max_groups_in_flight are being
--          played, and weights are published. The same nonce again gives the same episodes and admits nothing, so a
--          caller that did not hear the answer asks again.
local worker, session, nonce, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local limit_train, limit_eval = tonumber(ARGV[5]), tonumber(ARGV[6])
local RETRY_ELSEWHERE_MS = 5000
local reply, claims = {}, {}

-- `settings` of the unit: {sampling, temperature, members, baselines}
local function answer(unit, index, attempts, version, settings)
  local sampling, temperature, members, baselines = unpack(settings)
  if is_scoring(index, members) then
    sampling, temperature = 'scoring', nil
  elseif is_baseline(index, members, baselines) then
    sampling, temperature = 'greedy', nil
  end
  reply[#reply + 1] = {unit, tonumber(index), tonumber(attempts), tonumber(version), sampling, temperature or ''}
end

local function hand_out(unit, index, attempts, version, settings)
  answer(unit, index, attempts, version, settings)
  claims[#claims + 1], claims[#claims + 2] = unit .. ':' .. index, attempts .. ':' .. nonce
end

-- An episode goes to another worker than the one that just failed it, if there is one to take it in time.
local function belongs_elsewhere(failed_by, now)
  if not failed_by then return false end
  local who, at = string.match(failed_by, '^(.*) (%d+)$')
  return who == worker and now - at < RETRY_ELSEWHERE_MS and redis.call('ZCARD', WORKERS) > 1
end

-- `most`: length of the reply up to which the queue is taken from.
local function take_from(queue, most, step, now, aside)
  while #reply < most do
    local token = redis.call('LPOP', queue)
    if not token then return end
    local unit, index = split_token(token)
    local attempts, failed_by, version, sampling, temperature, members, baselines = unpack(redis.call(
      'HMGET', meta_key(unit), 'a' .. index, 'x' .. index, 'version', 'sampling', 'temperature', 'members', 'baselines'))
    if belongs_elsewhere(failed_by, now) then
      aside[#aside + 1] = {queue, token}
    else
      if is_group(unit) then version = step end
      redis.call('HSET', meta_key(unit), 'o' .. index, worker, 'c' .. index, version)
      hand_out(unit, index, attempts or '0', version, {sampling, temperature, members, baselines})
    end
  end
end

-- Admit a group; its first members are handed out, the others wait in the queue.
local function admit(limits, most, step)
  local number = redis.call('HINCRBY', LEDGER, 'next', 1) - 1
  local unit, baselines = 't:' .. number, limits.baselines or 0
  local members = limits.group_size + limits.redundancy + baselines
  local taken, settings = math.min(members, most - #reply), {'train', limits.temperature, members, baselines}
  local fields = {'size', limits.group_size + baselines, 'members', members, 'baselines', baselines, 'greedy', 0,
    'done', 0, 'failed', 0, 'version', step, 'sampling', 'train'}
  local queued = {}
  for index = 0, members - 1 do
    if index < taken then
      hand_out(unit, index, '0', step, settings)
      fields[#fields + 1], fields[#fields + 2], fields[#fields + 3], fields[#fields + 4] =
        'o' .. index, worker, 'c' .. index, step
    else
      queued[#queued + 1] = unit .. ':' .. index
    end
  end
  if limits.temperature then fields[#fields + 1], fields[#fields + 2] = 'temperature', limits.temperature end
  redis.call('HINCRBY', LEDGER, 'admitted', 1)
  call_in_parts(fields, 'HSET', meta_key(unit))
  redis.call('ZADD', ASSEMBLING, step, number)
  call_in_parts(queued, 'RPUSH', QUEUE_TRAIN)
  record(number, 'admitted', step)
end

local function claim_new(limits, step, now)
  local aside = {}
  take_from(QUEUE_EVAL, math.min(limit, limit_eval), step, now, aside)
  local most = math.min(limit, #reply + limit_train)
  -- Given-back members of groups can exist only once weights are published, so `step` is there when it is read.
  take_from(QUEUE_TRAIN, most, step, now, aside)
  local room = count_admissible(limits, step)
  while #reply < most and room > 0 do
    admit(limits, most, step)
    room = room - 1
  end
  local free, is_work_left = most - #reply, room > 0 or redis.call('LLEN', QUEUE_TRAIN) > 0
  call_in_parts(claims, 'HSET', claims_key(worker))
  for i = #aside, 1, -1 do redis.call('LPUSH', aside[i][1], aside[i][2]) end
  if free > 0 then
    redis.call('ZADD', IDLE, free, worker)
  else
    redis.call('ZREM', IDLE, worker)
    if is_work_left then wake_one() end
  end
end

local function claim_again()
  local flat = redis.call('HGETALL', claims_key(worker))
  for i = 1, #flat, 2 do
    local attempt, given = string.match(flat[i + 1], '^(%d+):(.*)$')
    if given == nonce then
      local unit, index = split_token(flat[i])
      local version, sampling, temperature, members, baselines = unpack(redis.call(
        'HMGET', meta_key(unit), 'c' .. index, 'sampling', 'temperature', 'members', 'baselines'))
      answer(unit, index, attempt, version, {sampling, temperature, members, baselines})
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
end
local newest = redis.call('XREVRANGE', DOORBELL, '+', '-', 'COUNT', 1)
return {newest[1] and newest[1][1] or '0-0', #reply > 0 and cmsgpack.pack(reply) or ''}
