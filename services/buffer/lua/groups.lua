-- Progress of active groups, oldest first.
--
-- ARGV     1 maximum number
-- Returns  {{number, size, done, failed, running members, queued members, version at admission, 1 if it waits for the rewards
--          of the whole group} ...}
local rows = {}
for _, number in ipairs(redis.call('ZRANGE', ASSEMBLING, 0, ARGV[1] - 1)) do
  local unit = 't:' .. number
  local size, members, done, failed, version, spared, scoring =
    unpack(redis.call('HMGET', meta_key(unit), 'size', 'members', 'done', 'failed', 'version', 'spared', 'scoring'))
  local played = 0
  for i = 0, members - 1 do played = played + redis.call('HEXISTS', meta_key(unit), 'o' .. i) end
  rows[#rows + 1] = {
    tonumber(number), tonumber(size), tonumber(done), tonumber(failed), played,
    members - done - failed - played - (spared or 0), tonumber(version), scoring and 1 or 0,
  }
end
return rows
