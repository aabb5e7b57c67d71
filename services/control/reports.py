"""Reports of ended runs, written one at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis import exceptions as redis_errors

from offbeat.services.control.run import ForeignRecordError, RunRecord, UnknownRunError
from offbeat.services.control.store import REPORT_DUE, REPORT_FAILED, REPORT_WRITTEN, RunStore
from offbeat.services.redis.errors import find_outage

logger = logging.getLogger(__name__)

RETRY_S = 5.0


class Reports:
    def __init__(self, store: RunStore, write: Callable[[RunRecord], Awaitable[None]] | None) -> None:
        """write: writes a report; None: something else does."""
        self._store = store
        self._write = write
        self._writing = asyncio.Lock()
        self._may_be_due = write is not None
        """At the start, and when a run has ended."""

    @property
    def at_end(self) -> str:
        """Return what to record of a report when its run ends; `note_end` follows."""
        return REPORT_DUE if self._write else ""

    def note_end(self) -> None:
        self._may_be_due = self._write is not None

    async def due(self) -> list[str]:
        """Return runs whose report is to be written."""
        if not self._may_be_due:
            return []
        self._may_be_due = False
        try:
            return await self._store.reports_due()
        except redis_errors.RedisError as error:
            self._may_be_due = True
            logger.warning("can't look for due reports: %s; retrying", error)
            return []

    async def write(self, run_id: str) -> None:
        """Write a report; only a Redis outage is retried."""
        try:
            async with self._writing:
                record = await self._store.load(run_id)
                if record.report == REPORT_DUE:  # else the run has been started again meanwhile
                    await self._write_of(record)
                self._may_be_due = True  # and it may have ended again
        except (UnknownRunError, ForeignRecordError):
            return
        except Exception as error:
            logger.warning("the report of run %s is delayed: %s", run_id, error)
            await asyncio.sleep(RETRY_S)
            self._may_be_due = True

    async def _write_of(self, record: RunRecord) -> None:
        assert self._write is not None
        self._store.reported.add(record.output_dir)
        try:
            await self._write(record)
            outcome = REPORT_WRITTEN
        except Exception as error:
            if find_outage(error):
                raise
            logger.error("run %s has no report: %s", record.run_id, error)
            outcome = REPORT_FAILED
        finally:
            self._store.reported.discard(record.output_dir)
        await self._store.close_report(record, outcome)
