"""Tasks of a task sampler, fixed for all workers and cached."""

import asyncio
import json
from collections import OrderedDict

from offbeat.services.buffer.api import RolloutBuffer
from offbeat.services.errors import EpisodeError
from offbeat.services.retry import retry_until_answered
from offbeat.services.rollout.tasks import BAD_TASK, Task, TaskConfig, train_task

MAX_CACHED_TASKS = 4096
"""Groups; older ones are reread."""


class TaskAssigner:
    def __init__(self, config: TaskConfig, seed: int, buffer: RolloutBuffer) -> None:
        self._config = config
        self._seed = seed
        self._buffer = buffer
        self._cache: OrderedDict[int, Task] = OrderedDict()
        self._lock = asyncio.Lock()

    async def task(self, number: int) -> Task:
        """Read a training group's task, or draw and store it; retry during outages.

        Raises:
            EpisodeError: `bad_task`, as the sampler failed or drew an invalid task.
        """
        if self._config.train_env_manager.task_sampler is None:
            return train_task(self._config, self._seed, number)
        async with self._lock:
            if number not in self._cache:
                self._cache[number] = await self._fetch_or_draw(number)
            if len(self._cache) > MAX_CACHED_TASKS:
                self._cache.popitem(last=False)
            return self._cache[number]

    async def _fetch_or_draw(self, number: int) -> Task:
        stored, state = await retry_until_answered(lambda: self._buffer.task(number))
        if not stored:
            drawn = json.dumps(self._draw(number, state))
            stored, _ = await retry_until_answered(lambda: self._buffer.task(number, drawn))
        return Task(*json.loads(stored))

    def _draw(self, number: int, state: str) -> Task:
        try:
            return train_task(self._config, self._seed, number, state)
        except Exception as error:  # the user's code
            raise EpisodeError(BAD_TASK, f"{type(error).__name__}: {error}") from error
