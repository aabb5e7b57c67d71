-- Make this Redis agree with what the surviving lineage of weights has trained, whatever Redis has forgotten.
--
-- ARGV     1 epoch, 2 uid of the run, 3 nonce, 4 msgpack of
--          known     greatest incarnation number that the learner or its journal has seen
--          saved     {{step, {number, ...}}, ...}: groups of each step that the newest durable checkpoint contains, from `lowest` on
--          lowest    number below which Redis holds no group, as this script has answered
--          entries   entry ids that it contains, where `saved` does not list them
--          step      step of that checkpoint
--          trained   how many groups that checkpoint contains; steps of another run, whose numbers `saved` lacks, included
--          held      {{number, version, step, reason}, ...}: groups that this learner took and has neither saved nor dropped;
--                    step and reason of those that it has refilled (see refill.lua), else 0 and nothing
--          next      lowest number that was certainly not given out
--          all_known whether `saved` lists all that are trained
--          changes   {{change, step}, ...}: changes of settings that the learner has adopted, in order
--          limits    {field, value, ...}, for a Redis that has none (a pause alone is none)
--          life      milliseconds of the newest event that was copied
--          metrics   id of the newest metric record that was copied
-- Returns  {incarnation, 1 if it is new, groups added (Redis had lost them and their numbers) or, negative, given up, groups
--          corrected, {number, entry id, ...} of held groups}; FENCED, FOREIGN; or, with nothing changed, the lowest number of the
--          groups that are in the stream, played or unknown, if that is below `lowest`
-- Invariants  afterwards no saved group is in the stream, played or queued; each held one is in the stream, without blobs if
--          they are lost (a successor drops it as `lost`); groups that the checkpoint's steps have refilled are dropped, and of
--          others those that this learner has refilled stay so; numbers that nobody knows are dropped as `lost`; trained is
--          what the checkpoint says; the identity of the ledger holds, and events tell of every correction. If groups past
--          the checkpoint were acknowledged, weights after its step are of a lineage that did not survive: progress starts
--          anew with it, their manifests go, and sampled groups in flight, which may have their tokens, are dropped. Repeating
--          it changes nothing.
local epoch, uid, nonce, proof = ARGV[1], ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4])
if is_fenced(epoch) then return fenced_reply(epoch) end
local owner = owner_uid()
if owner and owner ~= uid then return foreign_reply() end

local function restore_limits()
  if not read_limits() and #proof.limits > 0 then redis.call('HSET', LIMITS, unpack(proof.limits)) end
  redis.pcall('XGROUP', 'CREATE', STREAM, LEARNER, '0', 'MKSTREAM')
  local known = {}
  for place, change in ipairs(redis.call('LRANGE', CHANGES, 0, -1)) do known[change] = place - 1 end
  for _, row in ipairs(proof.changes) do
    local change, step = unpack(row)
    local place = known[change] or redis.call('RPUSH', CHANGES, change) - 1
    adopt_change(place, change, step)
  end
end

local corrected, counts = 0, {admitted = 0, submitted = 0, trained = 0}
local function count(...)
  for _, field in ipairs({...}) do counts[field] = counts[field] + 1 end
end
local function write_counts()
  for field, number in pairs(counts) do
    if number > 0 then redis.call('HINCRBY', LEDGER, field, number) end
  end
end

-- Ids of events and metrics grow with the server's clock, and a promoted replica's may be behind.
local function lift_events()
  local newest = redis.call('XREVRANGE', LIFE, '+', '-', 'COUNT', 1)[1]
  local at = newest and tonumber(string.match(newest[1], '^%d+')) or 0
  if at >= proof.life then return end
  local id = string.format('%.0f-0', proof.life + 1)
  local ordinal = redis.call('HINCRBY', LEDGER, 'events', 1)
  redis.call('XADD', LIFE, 'MAXLEN', '~', LIFE_LIMIT, id, 'n', 0, 'e', 'reconciled', 'd', 'clock', 'i', ordinal)
end

-- An id that is not above the stream's newest one is refused.
local function lift_metrics()
  local added = redis.pcall('XADD', METRICS, proof.metrics, 'r', '')
  if type(added) == 'string' then redis.call('XDEL', METRICS, added) end
end

local streamed, next_number = {}, tonumber(redis.call('HGET', LEDGER, 'next') or 0)
for _, entry in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do streamed[tonumber(entry[2][2])] = entry end
local first_new, lowest, playing = next_number, next_number, {}
for number in pairs(streamed) do lowest = math.min(lowest, number) end
for _, number in ipairs(redis.call('ZRANGE', ASSEMBLING, 0, -1)) do
  playing[tonumber(number)] = true
  lowest = math.min(lowest, tonumber(number))
end
if lowest < proof.lowest then return lowest end

-- Take a group out of assembly; true if it was there.
local function stop_assembly(number)
  if not playing[number] then return false end
  playing[number] = nil
  local unit = 't:' .. number
  vacate(unit, tonumber(redis.call('HGET', meta_key(unit), 'members')))
  redis.call('DEL', meta_key(unit), blobs_key(unit))
  redis.call('ZREM', ASSEMBLING, number)
  return true
end

local touched = {}
local function save(step, numbers)
  local restored = {}
  for _, number in ipairs(numbers) do
    local entry = streamed[number]
    touched[number] = true
    if entry then
      redis.call('XACK', STREAM, LEARNER, entry[1])
      redis.call('XDEL', STREAM, entry[1])
      redis.call('DEL', blobs_key('t:' .. number))
      streamed[number] = nil
      count('trained')
    elseif stop_assembly(number) then
      count('submitted', 'trained')
    elseif number >= first_new then
      count('admitted', 'submitted', 'trained')
    else
      number = nil
    end
    if number then restored[#restored + 1] = number end
  end
  if #restored > 0 then
    corrected = corrected + #restored
    record(restored[1], 'restored', step .. ':' .. table.concat(restored, ','))
  end
end

-- Entries of a checkpoint whose journal is of an older build, or gone.
local function save_entries(step, ids)
  for _, id in ipairs(ids) do
    local entry = redis.call('XRANGE', STREAM, id, id)[1]
    if entry then save(step, {tonumber(entry[2][2])}) end
  end
end

local function drop_streamed(number, reason)
  local entry = streamed[number]
  if touched[number] or not entry then return end
  redis.call('XACK', STREAM, LEARNER, entry[1])
  redis.call('XDEL', STREAM, entry[1])
  redis.call('DEL', blobs_key('t:' .. number))
  streamed[number], touched[number] = nil, true
  corrected = corrected + 1
  count_out(number, 'dropped', reason)
end

local function hold(number, version)
  if touched[number] then return nil end
  touched[number] = true
  if streamed[number] then return streamed[number][1] end
  if stop_assembly(number) then
    count('submitted')
  elseif number >= first_new then
    count('admitted', 'submitted')
    record(number, 'admitted', version)
  else
    return nil
  end
  corrected = corrected + 1
  record(number, 'submitted', version)
  return redis.call('XADD', STREAM, '*', 'n', number, 'v', version, 't', '', 'lost', 1)
end

local function rewind()
  if tonumber(redis.call('HGET', PROGRESS, 'version') or -1) <= proof.step then return end
  redis.call('DEL', MANIFESTS)
  if not read_limits().temperature then -- rows are sampled by no weights
    redis.call('HSET', PROGRESS, 'version', proof.step, 'step', proof.step)
    return
  end
  redis.call('DEL', PROGRESS) -- nothing is claimed before the checkpoint's weights are announced
  local sampled = {}
  for number, entry in pairs(streamed) do
    -- The entry's version is that of its admission: later ones may have sampled it, too
    if not touched[number] and entry[2][6] ~= '' then sampled[#sampled + 1] = number end
  end
  table.sort(sampled)
  for _, number in ipairs(sampled) do drop_streamed(number, 'rewound') end
  for _, number in ipairs(redis.call('ZRANGE', ASSEMBLING, 0, -1)) do
    local unit = 't:' .. number
    end_group(unit, tonumber(redis.call('HGET', meta_key(unit), 'members')), 'dropped', 'rewound')
    corrected = corrected + 1
  end
end

restore_limits()
lift_events()
lift_metrics()
forget_scanned()
local refilled = refilled_until(proof.step)
for _, number in ipairs(redis.call('HKEYS', REFILLED)) do unmark_refilled(number) end
for _, row in ipairs(proof.saved) do save(row[1], row[2]) end
save_entries(proof.step, proof.entries)
for _, row in ipairs(refilled) do drop_streamed(tonumber(row[1]), row[3]) end
local entries = {}
for _, row in ipairs(proof.held) do
  local number, version, step, reason = unpack(row)
  local entry = hold(number, version)
  if entry then
    if step > 0 then mark_refilled(number, step, entry, reason) end
    entries[#entries + 1] = number
    entries[#entries + 1] = entry
  end
end
for number = first_new, (proof.all_known and proof.next or 0) - 1 do
  if not touched[number] then
    count('admitted')
    record(number, 'admitted', 0)
    count_out(number, 'dropped', 'lost')
    corrected = corrected + 1
  end
end
write_counts()
if proof.next > next_number then redis.call('HSET', LEDGER, 'next', proof.next) end

local missing = proof.trained - (redis.call('HGET', LEDGER, 'trained') or 0)
if missing ~= 0 then redis.call('HINCRBY', LEDGER, 'trained', missing) end
if missing > 0 then
  redis.call('HINCRBY', LEDGER, 'admitted', missing)
  redis.call('HINCRBY', LEDGER, 'submitted', missing)
elseif missing < 0 then -- the newest checkpoints are gone: their groups were trained in a lineage that did not survive
  redis.call('HINCRBY', LEDGER, 'dropped', -missing)
  redis.call('HINCRBY', LEDGER, 'dropped:rewound', -missing)
  rewind()
end

local incarnation, is_new = redis.call('GET', INCARNATION), 0
if not incarnation or is_pending(incarnation) or uid_of(incarnation) ~= uid or number_of(incarnation) < proof.known then
  local number = math.max(incarnation and number_of(incarnation) or 0, proof.known) + 1
  incarnation, is_new = make_incarnation(uid, number, nonce), 1
  redis.call('SET', INCARNATION, incarnation)
  record(0, 'reconciled', tostring(number))
end
ring('restore')
return {incarnation, is_new, missing, corrected, entries}
