-- Announce one weight version.
-- KEYS: epoch, manifests, progress, doorbell, versions, incarnation
-- ARGV: epoch of the caller, version, step, manifest, versions that stay, incarnation that the caller knows,
--       then the versions whose bytes the caller found gone
-- Returns {"fenced", current epoch} | {"reconcile", current incarnation} | {"exists"}
--         | {"announced", manifest that fell out, ...}
--
-- `version` of `progress` goes back in reconcile.lua of the buffer alone. A version that is not newer is a replay and is left alone, unless every
-- manifest from that version on is among those whose bytes are gone (or none is left): then it is announced again, and `step` goes back to it, so that
-- nothing waits for weights that do not exist.
local epoch, version = tonumber(ARGV[1]), tonumber(ARGV[2])
local current = tonumber(redis.call('GET', KEYS[1]) or '0')
if epoch < current then
  return { 'fenced', tostring(current) }
end
local incarnation = redis.call('GET', KEYS[6])
if incarnation ~= ARGV[6] then
  return { 'reconcile', incarnation or '' }
end
if epoch ~= current then
  return { 'fenced', tostring(current) }
end

-- The same announcement again: its answer was lost on the way.
if redis.call('HGET', KEYS[2], ARGV[2]) == ARGV[4] then
  return { 'announced' }
end

local gone = {}
for i = 7, #ARGV do
  gone[ARGV[i]] = true
end
local newest = tonumber(redis.call('HGET', KEYS[3], 'version') or '-1')
if version <= newest then
  for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
    if tonumber(field) >= version and not gone[field] then
      return { 'exists' }
    end
  end
end

for i = 7, #ARGV do
  redis.call('HDEL', KEYS[2], ARGV[i])
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
redis.call('HSET', KEYS[3], 'version', string.format('%d', math.max(version, newest)), 'step', ARGV[3])

local kept = {}
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  kept[#kept + 1] = tonumber(field)
end
table.sort(kept)
local out = { 'announced' }
for i = 1, #kept - tonumber(ARGV[5]) do
  local field = string.format('%d', kept[i])
  out[#out + 1] = redis.call('HGET', KEYS[2], field)
  redis.call('HDEL', KEYS[2], field)
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', '1000', '*', 'weights', ARGV[2])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', '100', '*', 'version', ARGV[2])
return out
