-- Take groups out of the stream for good: trained (their checkpoint is durable) or dropped. Groups that the checkpoint's steps have
-- refilled leave it with the trained ones.
--
-- ARGV     1 epoch, 2 `trained` or `dropped`, 3 the step of the checkpoint, or the reason, 4 why blobs are unreadable,
--          5 members whose blobs are kept in quarantine, comma-separated, 6 `more` if a later call has further entries of the
--          checkpoint (refilled groups leave with the last), else nothing, 7... entry ids
-- Returns  how many of the entries were still in; FENCED
-- Invariants  an entry is counted once, whatever is repeated; the entry, its pending mark and its blobs go together.
local epoch, outcome, detail = ARGV[1], ARGV[2], ARGV[3] -- `unpack` takes 8,000
local complaint, unreadable, is_last = ARGV[4], ARGV[5], ARGV[6] ~= 'more'
local QUARANTINE_KEPT = 16
if is_fenced(epoch) then return fenced_reply(epoch) end

local function quarantine(number, unit)
  for index in string.gmatch(unreadable, '%d+') do
    local blob = redis.call('HGET', blobs_key(unit), index) or ''
    redis.call('LPUSH', QUARANTINE, cmsgpack.pack({unit, tonumber(index), complaint, blob}))
  end
  redis.call('LTRIM', QUARANTINE, 0, QUARANTINE_KEPT - 1)
end

local ids, blobs, numbers, seen = {}, {}, {}, {}
for i = 7, #ARGV do
  local entry = redis.call('XRANGE', STREAM, ARGV[i], ARGV[i])[1]
  if entry and not seen[entry[1]] then
    seen[entry[1]] = true
    local number = entry[2][2]
    local unit = 't:' .. number
    if unreadable ~= '' then quarantine(number, unit) end
    ids[#ids + 1], blobs[#blobs + 1], numbers[#numbers + 1] = entry[1], blobs_key(unit), number
  end
end
local count, refilled = #ids, outcome == 'trained' and is_last and refilled_until(tonumber(detail)) or {}
for _, row in ipairs(refilled) do
  local number, id = unpack(row)
  if seen[id] or #redis.call('XRANGE', STREAM, id, id) == 0 then
    unmark_refilled(number)
    row[3] = nil
  else
    ids[#ids + 1], blobs[#blobs + 1] = id, blobs_key('t:' .. number)
    redis.call('HDEL', REFILLED, number)
  end
end
if #ids == 0 then return 0 end
for _, number in ipairs(numbers) do unmark_refilled(number) end
call_in_parts(ids, 'XACK', STREAM, LEARNER)
call_in_parts(ids, 'XDEL', STREAM)
call_in_parts(blobs, 'DEL')
if outcome == 'trained' then redis.call('HINCRBY', LEDGER, 'trained', count) end
for _, number in ipairs(numbers) do
  if outcome == 'trained' then record(number, 'trained', detail) else count_out(number, outcome, detail) end
end
for _, row in ipairs(refilled) do
  if row[3] then record(row[1], 'dropped', row[3]) end
end
ring(outcome)
return count
