-- Tell a worker the incarnation of the run's data, after making the data agree with what the worker holds.
--
-- ARGV     1 worker (empty: only the incarnation is asked for), 2 its session, 3 nonce of its next claim, 4 uid of the run that it works for,
--          5 msgpack of {token, attempt, version} of each episode that it plays or submits
-- Returns  the incarnation; nil while the learner has yet to reconcile this Redis; FOREIGN
-- Invariants  claims that the worker does not hold return to the queue, without counting an attempt; a held episode that is
--          queued here is claimed again; any other held one is cancelled by the next heartbeat. Claims whose reply may be
--          under way (they carry the nonce) stay.
local worker, session, nonce, uid, held = ARGV[1], ARGV[2], ARGV[3], ARGV[4], cmsgpack.unpack(ARGV[5])
local owner = owner_uid()
if owner and owner ~= uid then return foreign_reply() end
if not owner and redis.call('TTL', EPOCH) > 0 then return redis.error_reply('FOREIGN the run was deleted') end
local incarnation = redis.call('GET', INCARNATION)
if not incarnation or is_pending(incarnation) then return nil end
local limits, now = read_limits(), now_ms()
if not limits or worker == '' then return incarnation end
if #held == 0 and not redis.call('ZSCORE', WORKERS, worker) then return incarnation end
enter(worker, session, limits, now)
local claims, is_held, requeued = claims_key(worker), {}, false

local function claim_again(token, attempt, version)
  local unit, index = split_token(token)
  local meta = meta_key(unit)
  local members, owned, submitted, failed, attempts = unpack(redis.call(
    'HMGET', meta, 'members', 'o' .. index, 's' .. index, 'd' .. index, 'a' .. index))
  if not members or owned or submitted or failed or tonumber(attempts or 0) ~= attempt then return end
  if redis.call('LREM', queue_of(unit), 1, token) == 0 then return end
  redis.call('HSET', meta, 'o' .. index, worker, 'c' .. index, version)
  redis.call('HSET', claims, token, attempt .. ':-')
end

for _, row in ipairs(held) do
  local token, attempt, version = unpack(row)
  is_held[token .. ' ' .. attempt] = true
  if redis.call('HEXISTS', claims, token) == 0 then claim_again(token, attempt, version) end
end
local flat = redis.call('HGETALL', claims)
for i = 1, #flat, 2 do
  local attempt, given = string.match(flat[i + 1], '^(%d+):(.*)$')
  if given ~= nonce and not is_held[flat[i] .. ' ' .. attempt] then
    local unit, index = split_token(flat[i])
    give_back(unit, index, worker, limits, nil, now)
    requeued = true
  end
end
if requeued then ring('requeue') end
return incarnation
