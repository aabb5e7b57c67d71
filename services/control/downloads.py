"""Runs that wait for downloads of models and datasets.

Invariant: a run is validated whole, and claims what it needs, before a component that uses one is built.
"""

from typing import Any, cast

from offbeat.services.control.claims import write_claims
from offbeat.services.control.run import RunRecord, RunSpec, RunState
from offbeat.services.control.store import RunStore, claim_keys
from offbeat.services.keys import RunKeys
from offbeat.services.redis.transactions import repeat_transaction


@repeat_transaction
async def complete_record(store: RunStore, record: RunRecord, spec: RunSpec) -> None:
    """Complete a waiting run's configuration. Idempotent.

    Raises:
        BusyError: another active run has claimed a resource.
    """
    key = RunKeys(record.run_id).record
    async with store.redis.pipeline() as pipe:
        await pipe.watch(key, *claim_keys(spec))
        started_at, downloads = await cast(Any, pipe.hmget(key, ["started_at", "downloads"]))
        if not downloads or float(started_at) != record.started_at:
            return
        claims = await store.find_claims(spec)
        pipe.multi()
        changes = {"config": spec.config, "downloads": "", "base": spec.base, "state": RunState.PREPARING.value}
        changes["max_steps"] = str(spec.max_steps)  # of a dataset's epochs
        pipe.hset(key, mapping=cast(dict[Any, Any], changes))
        write_claims(pipe, claims)
        await pipe.execute()
