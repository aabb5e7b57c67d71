-- Which task a group plays where a sampler draws it: the first worker that says so decides, and all others hear it.
--
-- ARGV     1 group number, 2 task, or '' to ask alone
-- Returns  {the group's task or '', the sampler's state or ''}
-- Invariants  a group's task never changes while it is being played; a group that is over keeps nothing.
local unit, task = meta_key('t:' .. ARGV[1]), ARGV[2]
local state = redis.call('GET', SAMPLER) or ''
if redis.call('EXISTS', unit) == 0 then return {task, state} end
if task ~= '' then redis.call('HSETNX', unit, 'task', task) end
return {redis.call('HGET', unit, 'task') or '', state}
