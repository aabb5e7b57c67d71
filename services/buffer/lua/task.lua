-- Set or return a group's task, if a sampler draws it: the first worker's draw holds for all members.
--
-- ARGV     1 group number, 2 task, or '' to read only
-- Returns  {the group's task or '', the sampler's state or ''}
-- Invariants  the task of an active group never changes; an ended group keeps nothing.
local unit, task = meta_key('t:' .. ARGV[1]), ARGV[2]
local state = redis.call('GET', SAMPLER) or ''
if redis.call('EXISTS', unit) == 0 then return {task, state} end
if task ~= '' then redis.call('HSETNX', unit, 'task', task) end
return {redis.call('HGET', unit, 'task') or '', state}
