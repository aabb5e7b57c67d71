"""Samples in progress, and their answers until they are fetched or forgotten.

They live in the server's memory: after its death a client is told that they are gone, and its SDK sends them again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from offbeat.services.tinker.errors import QueueFullError
from offbeat.services.tinker.records import Result

KEEP_S = 600.0
"""Time for which an answer is kept."""


@dataclass(slots=True)
class Sample:
    owner: str
    size: int
    """Sequences."""
    task: asyncio.Task[Result]
    done_at: float | None = None


@dataclass(slots=True)
class SampleFutures:
    max_samples: int
    """Sequences that one owner may have in progress."""
    clock: Callable[[], float] = time.monotonic
    _samples: dict[str, Sample] = field(default_factory=dict[str, Sample])

    def start(self, request_id: str, owner: str, size: int, work: Coroutine[Any, Any, Result]) -> None:
        """Start a sample, once.

        Raises:
            QueueFullError: the owner has too many in progress.
        """
        self._forget_old()
        if request_id in self._samples:
            work.close()
            return
        running = sum(each.size for each in self._samples.values() if each.owner == owner and not each.task.done())
        if running and running + size > self.max_samples:
            work.close()
            raise QueueFullError(f"{running} sequences of this key are being sampled, and {self.max_samples} may be")
        sample = Sample(owner, size, asyncio.create_task(work))
        self._samples[request_id] = sample
        sample.task.add_done_callback(lambda _: setattr(sample, "done_at", self.clock()))

    def find(self, request_id: str, owner: str) -> asyncio.Task[Result] | None:
        """Return a sample of the owner, unless it was cancelled or forgotten."""
        sample = self._samples.get(request_id)
        if sample is None or sample.owner != owner or sample.task.cancelled():
            return None
        return sample.task

    def cancel(self, request_id: str, owner: str) -> None:
        if (task := self.find(request_id, owner)) is not None:
            task.cancel()

    def close(self) -> None:
        for sample in self._samples.values():
            sample.task.cancel()

    def _forget_old(self) -> None:
        limit = self.clock() - KEEP_S
        for request_id in [
            key for key, each in self._samples.items() if each.done_at is not None and each.done_at < limit
        ]:
            del self._samples[request_id]
