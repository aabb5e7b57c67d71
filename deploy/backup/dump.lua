-- Dump every key of a run at one moment.
--
-- KEYS     1 record, 2 epoch, 3 ledger of the buffer, 4 its stream of events
-- ARGV     1 prefix of the run's keys
-- Returns  {record, epoch, id of the newest event or '', lowest group number that was not given out, {key, dump, ...}};
--          keys that expire are left out: they tell that a process lives
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
local next_number = tonumber(redis.call('HGET', KEYS[3], 'next') or 0)
local dumps = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  if key ~= KEYS[2] and redis.call('TTL', key) == -1 then
    dumps[#dumps + 1] = key
    dumps[#dumps + 1] = redis.call('DUMP', key)
  end
end
return {redis.call('HGETALL', KEYS[1]), tonumber(redis.call('GET', KEYS[2]) or 0), newest and newest[1] or '', next_number, dumps}
