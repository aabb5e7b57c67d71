-- Keep finished trajectories; the last one that a group needs moves the group to the stream in the same step, or, if rewards
-- of the whole group are to score it, queues these as one more member (see score_group.lua).
--
-- ARGV     1 worker, 2 msgpack of {unit, member, oldest version that sampled a token of it (empty: none), blob, sample that
--          rewards of the whole group compare (empty: none)} ...
-- Returns  msgpack of accepted | completed | duplicate | late for each, as `SubmitResult`
-- Invariants  a member is kept once, whoever played it and however often it is sent; a group enters the stream once,
--          with exactly `size` members, all its baselines among them; siblings that are not needed any more are cancelled;
--          trajectories that come together are kept as if each had come alone, in their order.
local worker, trajectories = ARGV[1], cmsgpack.unpack(ARGV[2])
local UNIT_FIELDS = {'size', 'members', 'done', 'failed', 'version', 'temperature', 'baselines', 'greedy', 'samples'}
local results, completed, to_score, evaluated = {}, false, false, false

-- What is known of a unit and of those of its members that came, which are `rows` of `trajectories`.
local function read(unit, rows)
  local fields = {unpack(UNIT_FIELDS)}
  for _, row in ipairs(rows) do
    local index = trajectories[row][2]
    for _, kind in ipairs({'o', 'c', 'd', 's'}) do fields[#fields + 1] = kind .. index end
  end
  local values = redis.call('HMGET', meta_key(unit), unpack(fields))
  local known = {
    unit = unit, group = is_group(unit), size = tonumber(values[1] or nil), members = tonumber(values[2] or nil),
    done = tonumber(values[3] or nil), failed = tonumber(values[4] or nil), version = values[5], temperature = values[6],
    baselines = tonumber(values[7] or 0), greedy = tonumber(values[8] or 0), samples = tonumber(values[9] or 0),
    blobs = {}, written = {}, left = {}, kept = {},
  }
  for i, row in ipairs(rows) do
    local at = #UNIT_FIELDS + 4 * (i - 1)
    known[row] = {owner = values[at + 1], claimed = values[at + 2], given_up = values[at + 3], submitted = values[at + 4]}
  end
  return known
end

local function is_spare(known, index)
  return known.group and not is_baseline(index, known.members, known.baselines)
    and known.done - known.greedy >= known.size - known.baselines
end

local function is_complete(known)
  if known.group then return known.done == known.size end
  return known.done + known.failed >= known.members
end

local function keep(known, row)
  local _, index, oldest, blob, sample = unpack(trajectories[row])
  local member = known[row]
  if member.submitted or known.kept[index] then return 'duplicate' end
  if not known.size then return redis.call('HEXISTS', blobs_key(known.unit), index) == 1 and 'duplicate' or 'late' end
  if member.given_up or is_spare(known, index) then return 'late' end
  known.kept[index] = true
  local blobs, written, left = known.blobs, known.written, known.left
  blobs[#blobs + 1], blobs[#blobs + 2] = index, blob
  written[#written + 1], written[#written + 2] = 's' .. index, oldest ~= '' and oldest or member.claimed or known.version
  left[#left + 1], left[#left + 2] = 'o' .. index, 'c' .. index
  if sample and sample ~= '' then
    written[#written + 1], written[#written + 2] = 'p' .. index, sample
    known.samples = known.samples + 1
  end
  known.done = known.done + 1
  if known.group and is_baseline(index, known.members, known.baselines) then known.greedy = known.greedy + 1 end
  if not member.owner then
    redis.call('LREM', queue_of(known.unit), 1, known.unit .. ':' .. index)
  elseif member.owner ~= worker then
    redis.call('HDEL', claims_key(member.owner), known.unit .. ':' .. index)
  end
  return is_complete(known) and known.samples == 0 and 'completed' or 'accepted'
end

-- While its baseline still plays, a group that has all its sampled members needs no more of those.
local function call_off_spares(known)
  local sampled, wanted = known.members - known.baselines, known.size - known.baselines
  if known.baselines == 0 or known.done - known.greedy < wanted then return end
  if redis.call('HSETNX', meta_key(known.unit), 'spared', sampled - wanted - known.failed) == 0 then return end
  vacate(known.unit, sampled)
  for i = 0, sampled - 1 do redis.call('HDEL', meta_key(known.unit), 'o' .. i, 'c' .. i) end
end

local function complete(known)
  if known.done + known.failed < known.members then vacate(known.unit, known.members) end
  enter_stream(known.unit, known.version, known.temperature)
  completed = true
end

-- The members that a group needs are there: its rewards come next, before what was not begun.
local function begin_scoring(known)
  local meta, spared = meta_key(known.unit), known.members - known.done - known.failed
  if spared > 0 then
    vacate(known.unit, known.members)
    for i = 0, known.members - 1 do redis.call('HDEL', meta, 'o' .. i, 'c' .. i) end
  end
  redis.call('HSET', meta, 'scoring', KNOWN, 'spared', spared)
  redis.call('LPUSH', QUEUE_TRAIN, known.unit .. ':' .. known.members)
  to_score = true
end

local function write(known)
  if #known.blobs == 0 then return end
  redis.call('HSET', blobs_key(known.unit), unpack(known.blobs))
  local is_done = known.group and is_complete(known)
  if is_done and known.samples == 0 then return complete(known) end -- and nothing of it is written any more
  redis.call('HDEL', meta_key(known.unit), unpack(known.left))
  redis.call('HSET', meta_key(known.unit), 'done', known.done, 'greedy', known.greedy, 'samples', known.samples,
    unpack(known.written))
  if is_done then
    begin_scoring(known)
  elseif known.group then
    call_off_spares(known)
  elseif is_complete(known) then
    evaluated = true
  end
end

local units, rows_of, tokens = {}, {}, {}
for row, trajectory in ipairs(trajectories) do
  local unit, index = unpack(trajectory)
  if not rows_of[unit] then
    rows_of[unit] = {}
    units[#units + 1] = unit
  end
  table.insert(rows_of[unit], row)
  tokens[row] = unit .. ':' .. index
end
touch(worker)
redis.call('HDEL', claims_key(worker), unpack(tokens))
for _, unit in ipairs(units) do
  local known = read(unit, rows_of[unit])
  for _, row in ipairs(rows_of[unit]) do results[row] = keep(known, row) end
  write(known)
end
if evaluated then ring('eval') end
if to_score or completed and count_admissible(read_limits(), tonumber(redis.call('HGET', PROGRESS, 'step') or nil)) > 0 then
  wake_one()
end
return cmsgpack.pack(results)
