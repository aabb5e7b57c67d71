-- Write the limits of admission and assembly, and make the stream's consumer group.
--
-- ARGV     1 uid of the run, 2 nonce, 3... field, value, ... (the fields of `BufferLimits`)
-- Returns  OK; or an error CHANGED when groups exist already and a step's shape (group_size, groups_per_step) differs,
--          because the ledger counts groups and could not say what step it is at.
-- Invariants  nothing that was counted changes: resuming a run calls this again; changes of settings that a learner has
--          adopted go on to hold. Data without an incarnation (of an older build, or of another uid) waits for a learner to
--          reconcile it.
local uid, nonce = table.remove(ARGV, 1), table.remove(ARGV, 1)
local old, new = read_limits(), {}
for i = 1, #ARGV, 2 do new[ARGV[i]] = ARGV[i + 1] end
if old and redis.call('HGET', LEDGER, 'admitted') then
  for _, field in ipairs({'group_size', 'groups_per_step'}) do
    if old[field] ~= new[field] then
      return redis.error_reply('CHANGED ' .. field .. ' is ' .. old[field] .. ' in this run and cannot become ' .. new[field])
    end
  end
end
redis.call('HSET', LIMITS, unpack(ARGV))
redis.call('HDEL', LEDGER, 'expired_at')
for place, change in ipairs(redis.call('LRANGE', CHANGES, 0, -1)) do
  if redis.call('HEXISTS', ADOPTED, place - 1) == 1 then apply_change(change) end
end
redis.pcall('XGROUP', 'CREATE', STREAM, LEARNER, '0', 'MKSTREAM')
forget_scanned()
local incarnation = redis.call('GET', INCARNATION)
if not incarnation or uid_of(incarnation) ~= uid then
  local number = incarnation and number_of(incarnation) + 1 or 1
  local pending = redis.call('HEXISTS', LEDGER, 'admitted') == 1 and '?' or ''
  redis.call('SET', INCARNATION, make_incarnation(uid, number, nonce) .. pending)
end
ring('configure')
return redis.status_reply('OK')
