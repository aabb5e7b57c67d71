"""Jobs on the files of runs, in threads: one of a kind for each run, a few at a time, whose newest state is in Redis."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

from redis import exceptions as redis_errors

from offbeat.services.control.console.schemas import JobView
from offbeat.services.control.run import ForeignRecordError, LostRecordError, RunRecord, RunStateError, UnknownRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ControlError, RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.run_writes import AsyncRunWrites
from offbeat.services.retry import retry_until_answered

logger = logging.getLogger(__name__)

View = TypeVar("View", bound=JobView[Any])


class RunJobs(Generic[View]):
    def __init__(
        self, store: RunStore, kind: str, view: type[View], max_jobs: int, too_many: type[ControlError]
    ) -> None:
        """kind: a noun, and the key's name in Redis. view: its default state is that without a job."""
        self._store = store
        self._kind = kind
        self._view = view
        self._max_jobs = max_jobs
        self._too_many = too_many
        self._threads = ThreadPoolExecutor(max_jobs, thread_name_prefix=kind)
        self._tasks: dict[tuple[str, str], asyncio.Task[None] | None] = {}
        """Task of each run (id and `uid`) with a job; None while its start is saved."""

    async def begin(self, record: RunRecord, view: View, work: Callable[[], dict[str, Any]]) -> View:
        """Start `work`, which returns the changed fields of the view.

        Raises:
            RunStateError: one of this run is running.
            UnknownRunError, LostRecordError: deleted or lost since `record` was read.
            ControlError: too many of other runs, of the type given.
        """
        run = record.run_id, record.uid
        if run in self._tasks:
            raise RunStateError(f"a {self._kind} of run {record.run_id!r} is running: wait for its end")
        if len(self._tasks) >= self._max_jobs:
            busy = ", ".join(sorted(run_id for run_id, _ in self._tasks))
            raise self._too_many(f"a {self._kind} of {busy} is running: wait for its end")
        view = view.model_copy(update={"began_at": self._store.clock()})
        self._tasks[run] = None
        try:
            if not await self._save(record, view):
                await self._store.load(record.run_id)  # of a lost record it raises, too
                raise UnknownRunError(f"run {record.run_id!r} was deleted or created anew")
        except BaseException:
            del self._tasks[run]
            raise
        task = asyncio.create_task(self._run(record, view, work), name=f"{self._kind} of {record.run_id}")
        self._tasks[run] = task
        task.add_done_callback(lambda _: self._tasks.pop(run))
        return view

    async def newest(self, run_id: str) -> View:
        """Return the newest one; failed if the service died during it."""
        record = await self._store.load(run_id)
        text = await cast(Any, self._store.redis.get(self._key(run_id)))
        if text is None:
            return self._view.model_validate({})
        view = self._view.model_validate_json(text)
        is_lost = view.is_running and (run_id, record.uid) not in self._tasks
        return view.failed("the service was restarted") if is_lost else view

    async def _run(self, record: RunRecord, view: View, work: Callable[[], dict[str, Any]]) -> None:
        try:
            changes = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            ended = view.model_copy(update=changes)
        except ControlError as error:
            ended = view.failed(str(error))
        except Exception as error:
            logger.exception("the %s of run %s failed", self._kind, record.run_id)
            ended = view.failed(f"{type(error).__name__}: {error}")
        ended = ended.model_copy(update={"ended_at": self._store.clock()})
        await retry_until_answered(lambda: self._save_end(record, ended))

    async def _save_end(self, record: RunRecord, view: View) -> None:
        """Save, unless the run was deleted meanwhile, even if its name is in use again; raises RetryableError."""
        try:
            if (await self._store.load(record.run_id)).uid == record.uid:
                await self._save(record, view)
        except (UnknownRunError, ForeignRecordError):
            return
        except (LostRecordError, redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise RetryableError(str(error)) from error

    async def _save(self, record: RunRecord, view: View) -> bool:
        """Save a view; return whether the run is still there."""
        write = AsyncRunWrites(self._store.redis, record.run_id, record.uid)
        return await write("SET", self._key(record.run_id), view.model_dump_json())

    def _key(self, run_id: str) -> str:
        return RunKeys(run_id).key(self._kind)
