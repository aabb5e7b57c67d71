"""End of sessions whose clients send no heartbeat, and of results that were fetched."""

import asyncio
import logging
import time

from redis import exceptions as redis_errors

from offbeat.services.tinker.owned_records import OwnedRecords
from offbeat.services.tinker.store import TinkerStore

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 60.0
RESULTS_INTERVAL_S = 10.0


class SessionExpiry:
    """Ends sessions whose heartbeat stays the same for `timeout_s`, in which the server was up, and its machine awake."""

    def __init__(self, records: OwnedRecords, timeout_s: float) -> None:
        self._records = records
        self._timeout_s = timeout_s
        self._heartbeats: dict[str, tuple[float, float]] = {}
        """Session id -> its last heartbeat, and when it was new."""

    async def run(self) -> None:
        """End idle sessions until cancelled."""
        while True:
            try:
                await self.end_idle(time.monotonic())
            except redis_errors.RedisError as error:
                logger.warning("Redis unavailable: %s; idle sessions are ended when it is back", error)
            await asyncio.sleep(min(self._timeout_s / 4, MAX_INTERVAL_S))

    async def end_idle(self, now: float) -> None:
        """End sessions without a new heartbeat. now: s of a clock that stops while the machine sleeps."""
        known = self._heartbeats
        self._heartbeats = {
            session_id: known[session_id] if session_id in known and known[session_id][0] == at else (at, now)
            for session_id, at in (await self._records.heartbeats()).items()
        }
        for session_id, (_, since) in self._heartbeats.items():
            if now - since >= self._timeout_s:
                await self._records.end_session(session_id)


class ResultExpiry:
    """Shortens the expiry of results that were fetched."""

    def __init__(self, store: TinkerStore) -> None:
        self._store = store

    async def run(self) -> None:
        """Shorten expiries until cancelled."""
        while True:
            await asyncio.sleep(RESULTS_INTERVAL_S)
            try:
                await self._store.expire_fetched()
            except redis_errors.RedisError as error:
                logger.warning("Redis unavailable: %s; results that were fetched take its memory for longer", error)
