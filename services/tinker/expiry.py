"""End of sessions whose clients send no heartbeat."""

import asyncio
import logging
import time

from redis import exceptions as redis_errors

from offbeat.services.tinker.owned_records import OwnedRecords

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 60.0


class SessionExpiry:
    """Ends sessions without a heartbeat for `timeout_s`, in which the server was up."""

    def __init__(self, records: OwnedRecords, timeout_s: float) -> None:
        self._records = records
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """End idle sessions until cancelled."""
        started_at = time.time()
        while True:
            await asyncio.sleep(min(self._timeout_s / 4, MAX_INTERVAL_S))
            if (before := time.time() - self._timeout_s) < started_at:
                continue  # no client could call before
            try:
                await self._records.end_idle_sessions(before)
            except redis_errors.RedisError as error:
                logger.warning("Redis unavailable: %s; idle sessions are ended when it is back", error)
