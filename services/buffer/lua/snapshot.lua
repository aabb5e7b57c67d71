-- The ledger and all queues at one moment.
--
-- Returns  {ledger, limits, progress (each flat), active groups, groups in the stream that are not refilled, of those delivered,
--          queued training episodes, queued evaluation episodes, unreadable blobs kept, clock of the heartbeats,
--          {worker, last heartbeat, episodes, ...}, epoch, what limits admission, refilled groups in the stream}
local pending = 0
if redis.call('EXISTS', STREAM) == 1 then pending = redis.call('XPENDING', STREAM, LEARNER)[1] end
local refilled = redis.call('HLEN', REFILLED)
local workers, flat = {}, redis.call('ZRANGE', WORKERS, 0, -1, 'WITHSCORES')
for i = 1, #flat, 2 do
  workers[#workers + 1] = flat[i]
  workers[#workers + 1] = flat[i + 1]
  workers[#workers + 1] = redis.call('HLEN', claims_key(flat[i]))
end
-- The observed clock (see sweep.lua) and the time since: without a claim or heartbeat it stands still.
local clock, now = redis.call('HGET', LEDGER, 'clock') or 0, now_ms()
clock = string.format('%.0f', clock + math.max(now - (redis.call('HGET', LEDGER, 'swept') or now), 0))
local _, admission = count_admissible(read_limits(), tonumber(redis.call('HGET', PROGRESS, 'step') or nil))
return {
  redis.call('HGETALL', LEDGER), redis.call('HGETALL', LIMITS), redis.call('HGETALL', PROGRESS),
  redis.call('ZCARD', ASSEMBLING), redis.call('XLEN', STREAM) - refilled, math.max(pending - refilled, 0),
  redis.call('LLEN', QUEUE_TRAIN), redis.call('LLEN', QUEUE_EVAL), redis.call('LLEN', QUARANTINE),
  clock, workers, redis.call('GET', EPOCH) or '0', admission, refilled,
}
