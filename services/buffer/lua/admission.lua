-- The staleness bound: how many groups may start, and which versions a step may still consume. Shared by every script.

-- Number of groups that may start, and what limits them: a value of `offbeat.services.buffer.api.Admission`.
-- `limits` is nil before `configure`, `step` before the first weights.
local function count_admissible(limits, step)
  if not limits then return 0, 'not_configured' end
  if limits.paused == '1' then return 0, 'paused' end
  if not step then return 0, 'no_weights' end
  if is_ledger_behind() then return 0, 'ledger_behind' end
  local admitted, dropped, failed = unpack(redis.call('HMGET', LEDGER, 'admitted', 'dropped', 'failed'))
  local standing = (admitted or 0) - (dropped or 0) - (failed or 0)
  -- A bound of n / groups_per_step versions is n groups, whatever its binary fraction rounds to.
  local lookahead = math.ceil((step + limits.max_staleness + 1) * limits.groups_per_step - 1e-6)
  local rooms = {
    {limits.total_groups - standing, 'all_admitted'},
    {lookahead - standing, 'staleness_bound'},
    {limits.max_groups_in_flight - redis.call('ZCARD', ASSEMBLING), 'groups_in_flight'},
  }
  local least = math.huge
  for _, room in ipairs(rooms) do
    if room[1] <= 0 then return 0, room[2] end
    least = math.min(least, room[1])
  end
  return least, 'open'
end

-- Oldest version that a step within the bound may consume. A lag is a whole number of versions.
local function oldest_consumable(limits, step) return step - math.ceil(limits.max_staleness) end
