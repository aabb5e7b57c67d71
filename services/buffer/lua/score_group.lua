-- Keep what the rewards of a whole group add to its members, and move the group to the stream in the same step.
--
-- ARGV     1 worker, 2 unit, 3 number of the member that stands for these rewards, 4 msgpack of {member, addition, ...},
--          5 mark of the samples that were compared (see samples.lua)
-- Returns  completed | duplicate | late, as `SubmitResult`
-- Invariants  a group is scored once, whoever did it and however often it is sent; it enters the stream with its additions,
--          which are of its own members: those of members that Redis has lost since are late, and the task returns to the queue.
local worker, unit, index, additions, mark = ARGV[1], ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4]), ARGV[5]
local meta, token = meta_key(unit), unit .. ':' .. index
touch(worker)
local scoring, owner, version, temperature = unpack(redis.call(
  'HMGET', meta, 'scoring', 'o' .. index, 'version', 'temperature'))
if scoring and scoring ~= mark then
  if owner == worker then
    give_back(unit, index, worker, read_limits(), nil, now_ms())
    wake_one()
  end
  return 'late'
end
redis.call('HDEL', claims_key(worker), token)
if not version then return redis.call('EXISTS', blobs_key(unit)) == 1 and 'duplicate' or 'late' end
if not scoring then return 'late' end
if not owner then
  redis.call('LREM', QUEUE_TRAIN, 1, token)
elseif owner ~= worker then
  redis.call('HDEL', claims_key(owner), token)
end
for i = 1, #additions, 2 do redis.call('HSET', blobs_key(unit), '+' .. additions[i], additions[i + 1]) end
enter_stream(unit, version, temperature)
if count_admissible(read_limits(), tonumber(redis.call('HGET', PROGRESS, 'step') or nil)) > 0 then wake_one() end
return 'completed'
