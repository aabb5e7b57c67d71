"""Samples in progress, and their answers for `KEEP_S`.

They are in the server's memory; after its death, the SDK sends them again.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from offbeat.services.tinker.errors import QueueFullError
from offbeat.services.tinker.records import Result

KEEP_S = 600.0


@dataclass(slots=True)
class Sample:
    owner: str
    task: asyncio.Task[Result]


@dataclass(slots=True)
class SampleFutures:
    max_samples: int
    """Sequences in progress of one owner."""
    keep_s: float = KEEP_S
    _running: Counter[str] = field(default_factory=Counter[str])
    """Owner -> sequences in progress."""
    _samples: dict[str, Sample] = field(default_factory=dict[str, Sample])

    def start(self, request_id: str, owner: str, size: int, work: Coroutine[Any, Any, Result]) -> None:
        """Start a sample once. size: sequences.

        Raises:
            QueueFullError: the owner has too many in progress.
        """
        if request_id in self._samples:
            work.close()
            return
        running = self._running[owner]
        if running and running + size > self.max_samples:
            work.close()
            raise QueueFullError(f"{running} sequences of this key are being sampled, and {self.max_samples} may be")
        self._running[owner] += size
        task = asyncio.create_task(work)
        self._samples[request_id] = Sample(owner, task)
        task.add_done_callback(lambda _: self._end(request_id, owner, size))

    def find(self, request_id: str, owner: str) -> asyncio.Task[Result] | None:
        """Return a sample of the owner, unless cancelled or expired."""
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

    def _end(self, request_id: str, owner: str, size: int) -> None:
        self._running[owner] -= size
        if not self._running[owner]:
            del self._running[owner]
        asyncio.get_running_loop().call_later(self.keep_s, self._samples.pop, request_id, None)
