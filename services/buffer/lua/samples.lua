-- What the rewards of a whole group compare.
--
-- ARGV     1 unit
-- Returns  msgpack of {mark, member, sample, ...}, by member; empty unless the group waits for these rewards. The mark names
--          these samples for score_group.lua
local unit = ARGV[1]
local meta = meta_key(unit)
local mark = redis.call('HGET', meta, 'scoring')
if not mark then return cmsgpack.pack({}) end
local reply = {mark}
for i = 0, redis.call('HGET', meta, 'members') - 1 do
  local sample = redis.call('HGET', meta, 'p' .. i)
  if sample then reply[#reply + 1], reply[#reply + 2] = i, sample end
end
return cmsgpack.pack(reply)
