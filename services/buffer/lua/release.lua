-- Give back all episodes of workers that stop, without counting an attempt.
--
-- ARGV     worker ...; none: all workers (a run that starts again knows that the old ones are gone)
-- Returns  how many episodes
-- Invariant  members keep their place: what was submitted stays, what was not can be claimed by anyone.
local workers = #ARGV > 0 and ARGV or redis.call('ZRANGE', WORKERS, 0, -1)
local limits, count = read_limits(), 0
for _, worker in ipairs(workers) do
  forget_worker(worker)
  count = count + give_back_all(worker, limits, nil, now_ms())
end
return count
