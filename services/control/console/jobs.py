"""Jobs on the files of runs, in threads: one of a kind for each run, a few at a time, whose newest state is in Redis."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

from offbeat.services.control.console.schemas import JobView
from offbeat.services.control.run import RunStateError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ControlError
from offbeat.services.keys import RunKeys

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
        self._tasks: dict[str, asyncio.Task[None] | None] = {}
        """Task of each run with a job; None while its start is saved."""

    async def begin(self, run_id: str, view: View, work: Callable[[], dict[str, Any]]) -> View:
        """Start `work`, which returns the changed fields of the view.

        Raises:
            RunStateError: one of this run is running.
            ControlError: too many of other runs, of the type given.
        """
        if run_id in self._tasks:
            raise RunStateError(f"a {self._kind} of run {run_id!r} is running: wait for its end")
        if len(self._tasks) >= self._max_jobs:
            busy = ", ".join(sorted(self._tasks))
            raise self._too_many(f"a {self._kind} of {busy} is running: wait for its end")
        view = view.model_copy(update={"began_at": self._store.clock()})
        self._tasks[run_id] = None
        try:
            await self._save(run_id, view)
        except BaseException:
            del self._tasks[run_id]
            raise
        task = asyncio.create_task(self._run(run_id, view, work), name=f"{self._kind} of {run_id}")
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id))
        return view

    async def newest(self, run_id: str) -> View:
        """Return the newest one; failed if the service died during it."""
        await self._store.load(run_id)
        text = await cast(Any, self._store.redis.get(self._key(run_id)))
        if text is None:
            return self._view.model_validate({})
        view = self._view.model_validate_json(text)
        return view.failed("the service was restarted") if view.is_running and run_id not in self._tasks else view

    async def _run(self, run_id: str, view: View, work: Callable[[], dict[str, Any]]) -> None:
        try:
            changes = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            ended = view.model_copy(update=changes)
        except ControlError as error:
            ended = view.failed(str(error))
        except Exception as error:
            logger.exception("the %s of run %s failed", self._kind, run_id)
            ended = view.failed(f"{type(error).__name__}: {error}")
        await self._save(run_id, ended.model_copy(update={"ended_at": self._store.clock()}))

    async def _save(self, run_id: str, view: View) -> None:
        await cast(Any, self._store.redis.set(self._key(run_id), view.model_dump_json()))

    def _key(self, run_id: str) -> str:
        return RunKeys(run_id).key(self._kind)
