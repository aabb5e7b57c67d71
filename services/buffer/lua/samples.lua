-- What the rewards of a whole group compare.
--
-- ARGV     1 unit
-- Returns  msgpack of {member, sample, ...}, by member; empty unless the group waits for these rewards
local unit = ARGV[1]
local meta, reply = meta_key(unit), {}
if redis.call('HEXISTS', meta, 'scoring') == 0 then return cmsgpack.pack(reply) end
for i = 0, redis.call('HGET', meta, 'members') - 1 do
  local sample = redis.call('HGET', meta, 'p' .. i)
  if sample then reply[#reply + 1], reply[#reply + 2] = i, sample end
end
return cmsgpack.pack(reply)
