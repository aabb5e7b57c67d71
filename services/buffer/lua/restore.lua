-- Make the ledger agree with the checkpoint that the learner goes on from, where the two remember different things.
--
-- ARGV     1 epoch, 2 groups that the checkpoint has trained, 3 the next group number that it knows (empty: that count)
-- Returns  how many groups were added (Redis had lost them) or, negative, given up; FENCED
-- Invariants  afterwards trained is what the checkpoint says, the identity of the ledger holds, and no number is given
--          out twice that the checkpoint or this Redis knows of. Repeating it changes nothing.
local epoch, trained = ARGV[1], tonumber(ARGV[2])
if is_fenced(epoch) then return fenced_reply(epoch) end
local missing = trained - (redis.call('HGET', LEDGER, 'trained') or 0)
redis.call('HINCRBY', LEDGER, 'trained', missing)
if missing > 0 then
  redis.call('HINCRBY', LEDGER, 'admitted', missing)
  redis.call('HINCRBY', LEDGER, 'submitted', missing)
elseif missing < 0 then -- the newest checkpoints are gone: their groups were trained in a lineage that did not survive
  redis.call('HINCRBY', LEDGER, 'dropped', -missing)
  redis.call('HINCRBY', LEDGER, 'dropped:rewound', -missing)
end
local next_number = tonumber(ARGV[3]) or trained
if tonumber(redis.call('HGET', LEDGER, 'next') or 0) < next_number then redis.call('HSET', LEDGER, 'next', next_number) end
if missing ~= 0 then ring('restore') end
return missing
