-- Keep one finished trajectory; the last one that a group needs moves the group to the stream in the same step.
--
-- ARGV     1 worker, 2 unit, 3 member, 4 oldest version that sampled a token of it (empty: none), 5 blob
-- Returns  accepted | completed | duplicate | late, as `SubmitResult`
-- Invariants  a member is kept once, whoever played it and however often it is sent; a group enters the stream once,
--          with exactly `size` members, all its baselines among them; siblings that are not needed any more are cancelled.
local worker, unit, index, oldest, blob = unpack(ARGV)
local meta, blobs, token = meta_key(unit), blobs_key(unit), unit .. ':' .. index
touch(worker)
redis.call('HDEL', claims_key(worker), token)
if redis.call('HEXISTS', blobs, index) == 1 then return 'duplicate' end

local size, members, done, failed, version, temperature, owner, claimed, given_up, baselines, greedy = unpack(redis.call(
  'HMGET', meta, 'size', 'members', 'done', 'failed', 'version', 'temperature', 'o' .. index, 'c' .. index, 'd' .. index,
  'baselines', 'greedy'))
if not size or given_up then return 'late' end
baselines, greedy = baselines or 0, greedy or 0
local is_greedy, wanted = is_baseline(index, members, baselines), size - baselines
if is_group(unit) and not is_greedy and done - greedy >= wanted then return 'late' end

redis.call('HSET', blobs, index, blob)
redis.call('HSET', meta, 's' .. index, oldest ~= '' and oldest or claimed or version)
redis.call('HDEL', meta, 'o' .. index, 'c' .. index)
done = redis.call('HINCRBY', meta, 'done', 1)
if not owner then
  redis.call('LREM', queue_of(unit), 1, token)
elseif owner ~= worker then
  redis.call('HDEL', claims_key(owner), token)
end

if not is_group(unit) then
  if done + failed < tonumber(members) then return 'accepted' end
  ring('eval')
  return 'completed'
end
if is_greedy then greedy = redis.call('HINCRBY', meta, 'greedy', 1) end
if done < tonumber(size) then
  local sampled = members - baselines
  if not is_greedy and done - greedy == wanted then -- a baseline still plays: its siblings need not
    redis.call('HSET', meta, 'spared', sampled - wanted - failed)
    vacate(unit, sampled)
    for i = 0, sampled - 1 do redis.call('HDEL', meta, 'o' .. i, 'c' .. i) end
  end
  return 'accepted'
end
local number = string.sub(unit, 3)
if done + failed < tonumber(members) then vacate(unit, tonumber(members)) end
redis.call('XADD', STREAM, '*', 'n', number, 'v', version, 't', temperature or '')
redis.call('DEL', meta)
redis.call('ZREM', ASSEMBLING, number)
redis.call('HINCRBY', LEDGER, 'submitted', 1)
record(number, 'submitted', version)
ring('complete')
return 'completed'
