-- Run once per connection, before its first command: mark the run's data as unverified if another server process, which may
-- have forgotten acknowledged writes, stored it.
-- KEYS: incarnation
local incarnation = redis.call('GET', KEYS[1])
if not incarnation or string.sub(incarnation, -1) == '?' then return 0 end
local info = redis.pcall('INFO', 'server')
local server = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
if string.match(incarnation, '^[^/]*/%d+/(%w+)/') == string.sub(server, 1, 12) then return 0 end
redis.call('SET', KEYS[1], incarnation .. '?')
return 1
