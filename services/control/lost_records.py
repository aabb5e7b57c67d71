"""Restoration of active runs' records that Redis has lost."""

import logging
from collections.abc import Sequence
from typing import Any, cast

from redis.exceptions import WatchError

from offbeat.services.control.run import RunRecord
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RUNS, RunKeys, claims_key, split_claim
from offbeat.services.redis.incarnation import uid_of

logger = logging.getLogger(__name__)

CLAIM_KINDS = ("folder", "app")

Claims = dict[str, list[str]]
"""Kind -> claimed resources."""


class LostRecords:
    def __init__(self, store: RunStore) -> None:
        self._redis = store.redis
        self._attended = store.attended
        self._known: dict[str, tuple[RunRecord, Claims]] = {}

    async def note(self, record: RunRecord) -> None:
        known = self._known.get(record.run_id)
        # A start whose models were downloaded has another configuration, and other claims
        same = known is not None and (known[0].started_at, known[0].config) == (record.started_at, record.config)
        self._known[record.run_id] = record, known[1] if known and same else await self._claims_of(record.run_id)
        self._attended.add(record.run_id)

    async def put_back(self, active: Sequence[str]) -> list[str]:
        """Restore lost records; return their runs. active: runs in Redis."""
        written: list[str] = []
        for run_id in [run_id for run_id in self._known if run_id not in active]:
            record, claims = self._known[run_id]
            if await self._write(record, claims):
                logger.error("run %s: Redis had lost its record; it was written again", run_id)
                written.append(run_id)
            del self._known[run_id]
            self._attended.discard(run_id)
        return written

    async def _claims_of(self, run_id: str) -> Claims:
        claims: Claims = {}
        for kind in CLAIM_KINDS:
            raw: dict[bytes, bytes] = await cast(Any, self._redis.hgetall(claims_key(kind)))
            claims[kind] = [name.decode() for name, claim in raw.items() if run_id in split_claim(claim)]
        return claims

    async def _write(self, record: RunRecord, claims: Claims) -> bool:
        """Return False if the record is there, or the run was deleted or created anew."""
        keys = RunKeys(record.run_id)
        async with self._redis.pipeline() as pipe:
            await pipe.watch(keys.record, keys.epoch, keys.incarnation)
            incarnation = cast(bytes | None, await cast(Any, pipe.get(keys.incarnation)))
            is_other = incarnation is not None and uid_of(incarnation.decode()) != record.uid
            # Without its configuration: a late write of this process
            is_there = await cast(Any, pipe.hexists(keys.record, "config"))
            if is_other or is_there or await cast(Any, pipe.ttl(keys.epoch)) > 0:
                return False
            pipe.multi()
            pipe.hset(keys.record, mapping=cast(dict[Any, Any], record.encode()))
            pipe.zadd(RUNS, {record.run_id: record.created_at})
            for kind, names in claims.items():
                for name in names:
                    pipe.hsetnx(claims_key(kind), name, record.run_id)  # a shared one's other runs claim it again
            try:
                await pipe.execute()
            except WatchError:
                return False
            return True
