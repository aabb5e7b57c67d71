-- Shared by every script of the buffer; `offbeat.services.buffer.scripts` puts it in front of them, with admission.lua and sweep.lua.
--
-- KEYS  1 root of the buffer's keys, 2 progress, 3 epoch, 4 doorbell, 5 changes, 6 adopted, 7 record, 8 history,
--       9 incarnation, 10 manifests, 11 metrics: one run, one hash tag, one slot. All other keys are made from the root.
-- ARGV  the last one is the incarnation that the caller knows (`offbeat.services.redis.incarnation`), or `*` for the run's
--       owner and for readers; the headers of the scripts count the others. Errors: RECONCILE, FOREIGN.
--
-- Keys made from the root:
--   limits            hash    what `configure` wrote and changes have set, and `paused`
--   ledger            hash    admitted, submitted, trained, dropped, failed, dropped:<reason>, failed:<reason>, next, events,
--                             lowest (number that may still be played; see take.lua)
--   assembling        zset    number of each group being played -> version at its admission, or the step to which the run went back since
--   stream            stream  complete groups (n number, v version at admission, t temperature), consumer group `learner`
--   unit:<unit>       hash    a unit is a group being played (t:<number>) or an evaluation (e:<id>): kind, size, members,
--                             baselines (the last of its members: greedy, all required), greedy (those of
--                             them that are done), spared (cancelled while others run), done, failed, version,
--                             sampling, temperature; per member i: o<i> owner, c<i> version at its claim,
--                             a<i> attempts that failed, x<i> worker and time of its last failure, s<i> oldest version that was
--                             submitted, d<i> reason of its final failure, p<i> sample that rewards of the whole group compare;
--                             scoring: its members are there and these rewards are not, which are one more member, of number
--                             `members`: the incarnation at which the last of them came, so that other members, played after Redis
--                             has gone back, have another one; task: drawn by a sampler
--   blobs:<unit>      hash    member -> trajectory; of a group until it is acknowledged or dropped. Of a complete group also
--                             <role>@<digest> -> score, ?<role>@<digest> -> the scorer that has claimed it, and until when, and
--                             +<member> -> what the rewards of the whole group add to the member's trajectory
--   scored            stream  groups that were scored, trimmed
--   scanned           hash    key of a score -> newest entry id of the stream that `unscored` takes into account
--   unscored:<key>    zset    entries up to that one which may lack the score -> their order
--   queue:t, queue:e  lists   unclaimed members, as tokens <unit>:<member>
--   claims:<worker>   hash    token -> attempt:nonce
--   worker:<worker>   hash    session and nonce of its last claim
--   workers           zset    worker -> last heartbeat, on the observed clock
--   idle              zset    worker -> places for members of groups that its last claim left free
--   bell:<worker>     stream  that it was woken; its last entry
--   life              stream  events of groups; those that are on the learner's disk are trimmed (trim.lua)
--   refilled          hash    number of each group that its step replaces -> step (as in `trained`), entry id and reason: it stays in
--                             the stream, for a learner that repeats the step, and leaves it with the step's checkpoint
--   quarantine        list    newest undecodable blobs
--   sampler           string  state of the task sampler
--
-- Invariants: admitted = trained + dropped + failed + ZCARD assembling + XLEN stream. A member of a live unit is exactly
-- one of: in a queue, claimed by one worker, submitted, failed. Time is Redis's own.

-- Why a call is refused whose caller knows another incarnation.
local function refuse_incarnation(current, known)
  local uid = string.match(known, '^[^/]*')
  local owner = current and string.match(current, '^[^/]*') or redis.call('HGET', KEYS[7], 'uid')
  if owner and owner ~= uid then return redis.error_reply('FOREIGN the run was created anew under this name') end
  if not owner and redis.call('TTL', KEYS[3]) > 0 then return redis.error_reply('FOREIGN the run was deleted') end
  return redis.error_reply('RECONCILE the run is at incarnation ' .. (current or 'none') .. ', the caller at ' .. known)
end

local ROOT, PROGRESS, EPOCH, DOORBELL = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local CHANGES, ADOPTED, RECORD, HISTORY = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local INCARNATION, MANIFESTS, METRICS = KEYS[9], KEYS[10], KEYS[11]
local KNOWN = table.remove(ARGV)
if KNOWN ~= '*' then
  local current = redis.call('GET', INCARNATION)
  if current ~= KNOWN then return refuse_incarnation(current, KNOWN) end
end
local LIMITS, LEDGER, ASSEMBLING = ROOT .. ':limits', ROOT .. ':ledger', ROOT .. ':assembling'
local STREAM, WORKERS, LIFE, QUARANTINE = ROOT .. ':stream', ROOT .. ':workers', ROOT .. ':life', ROOT .. ':quarantine'
local QUEUE_TRAIN, QUEUE_EVAL = ROOT .. ':queue:t', ROOT .. ':queue:e'
local LEARNER = 'learner'
local SAMPLER, SCORED, IDLE = ROOT .. ':sampler', ROOT .. ':scored', ROOT .. ':idle'
local REFILLED, SCANNED = ROOT .. ':refilled', ROOT .. ':scanned'
local BELL_KEPT, REASONS_KEPT = 128, 64
local LIFE_KEPT, LIFE_LIMIT = 100000, 1000000 -- events: copied ones that are kept; all, without a copier
local UNPACKED = 1000 -- maximum arguments per command; even, to keep pairs together

local function meta_key(unit) return ROOT .. ':unit:' .. unit end
local function blobs_key(unit) return ROOT .. ':blobs:' .. unit end
local function claims_key(worker) return ROOT .. ':claims:' .. worker end
local function worker_key(worker) return ROOT .. ':worker:' .. worker end
local function unscored_key(key) return ROOT .. ':unscored:' .. key end
local function bell_key(worker) return ROOT .. ':bell:' .. worker end
local function is_group(unit) return string.sub(unit, 1, 1) == 't' end
local function queue_of(unit) return is_group(unit) and QUEUE_TRAIN or QUEUE_EVAL end
local function is_baseline(index, members, baselines) return tonumber(index) >= members - (baselines or 0) end
local function is_scoring(index, members) return tonumber(index) == tonumber(members) end
local function split_token(token) return string.match(token, '^(.*):(%d+)$') end

-- Identity of this server's process: another one may hold older data.
local function server_id()
  local info = redis.pcall('INFO', 'server')
  return type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
end
local function make_incarnation(uid, number, nonce)
  return uid .. '/' .. number .. '/' .. string.sub(server_id(), 1, 12) .. '/' .. nonce
end
local function uid_of(incarnation) return string.match(incarnation, '^[^/]*') end
local function number_of(incarnation) return tonumber(string.match(incarnation, '^[^/]*/(%d+)/')) or 0 end
local function is_pending(incarnation) return string.sub(incarnation, -1) == '?' end
-- A uid that this Redis has for the run, or nil: it knows nothing of it.
local function owner_uid()
  local uid = redis.call('HGET', RECORD, 'uid')
  if uid then return uid end
  local incarnation = redis.call('GET', INCARNATION)
  return incarnation and uid_of(incarnation) or nil
end
local function foreign_reply() return redis.error_reply('FOREIGN the run was created anew under this name') end

-- Run a command over a list of any length: `redis.call(..., unpack(list))`.
local function call_in_parts(list, ...)
  for first = 1, #list, UNPACKED do
    local arguments = {...}
    for i = first, math.min(first + UNPACKED - 1, #list) do arguments[#arguments + 1] = list[i] end
    redis.call(unpack(arguments))
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Wake all waiting workers and the learner.
local function ring(event) redis.call('XADD', DOORBELL, 'MAXLEN', '~', BELL_KEPT, '*', 'e', event) end

-- Wake the idle worker with the most free places; if its claim leaves work, it wakes the next one. A group that starts
-- costs a few claims, however many workers wait.
local function wake_one()
  local worker
  repeat worker = redis.call('ZPOPMAX', IDLE)[1] until not worker or redis.call('ZSCORE', WORKERS, worker)
  if worker then redis.call('XADD', bell_key(worker), 'MAXLEN', 1, '*', 'e', 'work') end
end

-- `i` counts without gaps, so that copies of the stream detect missed events and data loss in Redis. The limit bounds memory alone:
-- admission ends at half of it, so that none is trimmed that was not copied.
local function record(number, event, detail)
  local ordinal = redis.call('HINCRBY', LEDGER, 'events', 1)
  redis.call('XADD', LIFE, 'MAXLEN', '~', LIFE_LIMIT, '*', 'n', number, 'e', event, 'd', detail, 'i', ordinal)
end

-- True if so many events wait for their copy on disk that no group may start.
local function is_ledger_behind() return redis.call('XLEN', LIFE) > LIFE_LIMIT / 2 end

-- Step, entry id and reason of a refilled group; nothing for others.
local function read_refilled(number)
  return string.match(redis.call('HGET', REFILLED, number) or '', '^(%d+) (%S+) (.*)$')
end

-- Refilled groups of steps up to `step`, as {number, entry id, reason}.
local function refilled_until(step)
  local rows, flat = {}, redis.call('HGETALL', REFILLED)
  for i = 1, #flat, 2 do
    local at, id, reason = read_refilled(flat[i])
    if tonumber(at) <= step then rows[#rows + 1] = {flat[i], id, reason} end
  end
  table.sort(rows, function(a, b) return tonumber(a[1]) < tonumber(b[1]) end)
  return rows
end

-- Let scorers examine the whole stream again: groups may need scores once more, and keys may be out of use.
local function forget_scanned()
  for _, key in ipairs(redis.call('HKEYS', SCANNED)) do redis.call('DEL', unscored_key(key)) end
  redis.call('DEL', SCANNED)
end

-- True for a learner that a newer one has replaced (or whose lease this Redis never gave).
local function is_fenced(epoch) return redis.call('GET', EPOCH) ~= epoch end
local function fenced_reply(epoch)
  local current = redis.call('GET', EPOCH) or 'none'
  return redis.error_reply('FENCED epoch ' .. epoch .. ' does not hold the run, its epoch is ' .. current)
end

-- Count an ended group. Distinct reasons are bounded; further ones count as `other`.
local function add_out(outcome, reason, by)
  local field = outcome .. ':' .. reason
  if redis.call('HEXISTS', LEDGER, field) == 0 and redis.call('HLEN', LEDGER) >= REASONS_KEPT then
    field = outcome .. ':other'
  end
  redis.call('HINCRBY', LEDGER, outcome, by)
  if redis.call('HINCRBY', LEDGER, field, by) == 0 then redis.call('HDEL', LEDGER, field) end
end
local function count_out(number, outcome, reason)
  add_out(outcome, reason, 1)
  record(number, outcome, reason)
end

-- A refilled group counts as dropped from its mark on: scripts of earlier builds start another one in its place, too.
local function mark_refilled(number, step, id, reason)
  if redis.call('HSET', REFILLED, number, step .. ' ' .. id .. ' ' .. reason) == 1 then add_out('dropped', reason, 1) end
end
local function unmark_refilled(number)
  local _, _, reason = read_refilled(number)
  if not reason then return end
  redis.call('HDEL', REFILLED, number)
  add_out('dropped', reason, -1)
end

-- Free every member that is still queued or claimed; workers learn of it from their next heartbeat.
local function vacate(unit, members)
  local meta = meta_key(unit)
  local last = redis.call('HEXISTS', meta, 'scoring') == 1 and members + 0 or members - 1
  for i = 0, last do
    local owner, submitted, failed = unpack(redis.call('HMGET', meta, 'o' .. i, 's' .. i, 'd' .. i))
    local token = unit .. ':' .. i
    if owner then
      redis.call('HDEL', claims_key(owner), token)
    elseif not submitted and not failed then
      redis.call('LREM', queue_of(unit), 1, token)
    end
  end
end

-- End an active group without entering it into the stream.
local function end_group(unit, members, outcome, reason)
  local number = string.sub(unit, 3)
  vacate(unit, members)
  redis.call('DEL', meta_key(unit), blobs_key(unit))
  redis.call('ZREM', ASSEMBLING, number)
  count_out(number, outcome, reason)
  ring(outcome)
end

-- Move a complete group to the stream.
local function enter_stream(unit, version, temperature)
  local number = string.sub(unit, 3)
  redis.call('XADD', STREAM, '*', 'n', number, 'v', version, 't', temperature or '')
  redis.call('DEL', meta_key(unit))
  redis.call('ZREM', ASSEMBLING, number)
  redis.call('HINCRBY', LEDGER, 'submitted', 1)
  record(number, 'submitted', version)
end

-- Requeue a claimed member. `reason` counts an attempt, nil does not.
local function give_back(unit, index, owner, limits, reason, now)
  local meta, token = meta_key(unit), unit .. ':' .. index
  redis.call('HDEL', claims_key(owner), token)
  if redis.call('HGET', meta, 'o' .. index) ~= owner then return end
  redis.call('HDEL', meta, 'o' .. index, 'c' .. index)
  if reason then
    local attempts = redis.call('HINCRBY', meta, 'a' .. index, 1)
    redis.call('HSET', meta, 'x' .. index, owner .. ' ' .. now)
    if attempts >= tonumber(limits.max_attempts) then
      redis.call('HSET', meta, 'd' .. index, reason)
      local failed = redis.call('HINCRBY', meta, 'failed', 1)
      local size, members, done, baselines = unpack(redis.call('HMGET', meta, 'size', 'members', 'done', 'baselines'))
      if not is_group(unit) then
        if done + failed == tonumber(members) then ring('eval') end
      elseif members - failed < tonumber(size) or is_baseline(index, members, baselines) or is_scoring(index, members) then
        end_group(unit, tonumber(members), 'failed', reason)
      end
      return
    end
  end
  redis.call('LPUSH', queue_of(unit), token)
end

-- Requeue all claims of a worker; returns their number.
local function give_back_all(worker, limits, reason, now)
  local tokens = redis.call('HKEYS', claims_key(worker))
  for _, token in ipairs(tokens) do
    local unit, index = split_token(token)
    give_back(unit, index, worker, limits, reason, now)
  end
  redis.call('DEL', claims_key(worker))
  if #tokens > 0 then ring('requeue') end
  return #tokens
end

local function forget_worker(worker)
  redis.call('ZREM', WORKERS, worker)
  redis.call('ZREM', IDLE, worker)
  redis.call('DEL', worker_key(worker), bell_key(worker))
end

-- The limits, or nil before `configure`.
local function read_limits()
  local flat = redis.call('HGETALL', LIMITS)
  local limits = {}
  for i = 1, #flat, 2 do limits[flat[i]] = flat[i + 1] end
  return limits.group_size and limits or nil
end

-- Apply a change of settings to admission.
local function apply_change(change)
  local values = cjson.decode(change).values
  for _, field in ipairs({'max_staleness', 'temperature'}) do
    if values[field] then redis.call('HSET', LIMITS, field, values[field]) end
  end
  if values.max_staleness then redis.call('HDEL', LEDGER, 'expired_at') end
  if values.num_env_groups then redis.call('HSET', LIMITS, 'max_groups_in_flight', values.num_env_groups) end
end

-- Adopt a change from a step on, unless it is adopted; true if it was not.
local function adopt_change(place, change, step)
  if redis.call('HSETNX', ADOPTED, place, step) == 0 then return false end
  apply_change(change)
  redis.call('XADD', HISTORY, 'MAXLEN', '~', 1000, '*', 'e', 'adopted', 'd',
    cjson.encode({values = cjson.decode(change).values, step = step}))
  return true
end

-- Record a heartbeat of a known worker (see `enter`).
local function touch(worker) redis.call('ZADD', WORKERS, 'XX', redis.call('HGET', LEDGER, 'clock') or 0, worker) end
