-- How far the groups are that are being played, oldest first.
--
-- ARGV     1 how many at most
-- Returns  {{number, size, done, failed, members that a worker plays, members that nobody plays, version at admission} ...}
local rows = {}
for _, number in ipairs(redis.call('ZRANGE', ASSEMBLING, 0, ARGV[1] - 1)) do
  local unit = 't:' .. number
  local size, members, done, failed, version, spared =
    unpack(redis.call('HMGET', meta_key(unit), 'size', 'members', 'done', 'failed', 'version', 'spared'))
  local played = 0
  for i = 0, members - 1 do played = played + redis.call('HEXISTS', meta_key(unit), 'o' .. i) end
  rows[#rows + 1] = {
    tonumber(number), tonumber(size), tonumber(done), tonumber(failed), played,
    members - done - failed - played - (spared or 0), tonumber(version),
  }
end
return rows
