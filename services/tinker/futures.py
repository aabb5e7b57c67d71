"""Samples in progress, and their answers for `KEEP_S`, or until the same key's later ones take their room.

They are in the server's memory; after its death, the SDK sends them again.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.services.tinker.errors import QueueFullError
from offbeat.services.tinker.records import Result

KEEP_S = 600.0
MAX_KEPT_BYTES = 256 << 20
"""Answers of an owner; the last one is kept whatever its size."""
MAX_TOP_VALUES = 1 << 23
"""Likely tokens of an owner's samples in progress: objects of some hundred bytes in the engine."""


class SampleSize(NamedTuple):
    """Of a sample: its sequences, and how many likely tokens it may return."""

    sequences: int
    top_values: int = 0


@dataclass(slots=True)
class Sample:
    owner: str
    task: asyncio.Task[Result]


class KeptAnswer(NamedTuple):
    size: int
    """Bytes."""
    expiry: asyncio.TimerHandle


@dataclass(slots=True)
class SampleFutures:
    max_samples: int
    """Sequences in progress of one owner."""
    keep_s: float = KEEP_S
    max_kept_bytes: int = MAX_KEPT_BYTES
    _running: Counter[str] = field(default_factory=Counter[str])
    """Owner -> sequences in progress."""
    _top_values: Counter[str] = field(default_factory=Counter[str])
    """Owner -> likely tokens that those in progress may return."""
    _samples: dict[str, Sample] = field(default_factory=dict[str, Sample])
    _kept: dict[str, dict[str, KeptAnswer]] = field(default_factory=dict[str, dict[str, KeptAnswer]])
    """Owner -> request id -> answer, the oldest first."""
    _kept_bytes: Counter[str] = field(default_factory=Counter[str])
    """By owner."""

    def start(self, request_id: str, owner: str, size: SampleSize, work: Coroutine[Any, Any, Result]) -> None:
        """Start a sample once.

        Raises:
            QueueFullError: the owner has too many in progress.
        """
        if request_id in self._samples:
            work.close()
            return
        if complaint := self._complain(owner, size):
            work.close()
            raise QueueFullError(complaint)
        self._running[owner] += size.sequences
        self._top_values[owner] += size.top_values
        task = asyncio.create_task(work)
        self._samples[request_id] = Sample(owner, task)
        task.add_done_callback(lambda task: self._end(request_id, owner, size, task))

    def _complain(self, owner: str, size: SampleSize) -> str:
        running, top_values = self._running[owner], self._top_values[owner]
        if running and running + size.sequences > self.max_samples:
            return f"{running} sequences of this key are being sampled, and {self.max_samples} may be"
        if top_values and top_values + size.top_values > MAX_TOP_VALUES:
            return f"{top_values} likely tokens of this key's samples are awaited, and {MAX_TOP_VALUES} may be"
        return ""

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

    def _end(self, request_id: str, owner: str, size: SampleSize, task: asyncio.Task[Result]) -> None:
        self._running[owner] -= size.sequences
        self._top_values[owner] -= size.top_values
        if not self._running[owner]:
            del self._running[owner], self._top_values[owner]
        has_answer = not task.cancelled() and task.exception() is None
        answer_bytes = len(task.result().body) if has_answer else 0
        expiry = asyncio.get_running_loop().call_later(self.keep_s, self._forget, request_id, owner)
        kept = self._kept.setdefault(owner, {})
        kept[request_id] = KeptAnswer(answer_bytes, expiry)
        self._kept_bytes[owner] += answer_bytes
        while len(kept) > 1 and self._kept_bytes[owner] > self.max_kept_bytes:
            self._forget(next(iter(kept)), owner)

    def _forget(self, request_id: str, owner: str) -> None:
        del self._samples[request_id]
        answer = self._kept[owner].pop(request_id)
        answer.expiry.cancel()
        self._kept_bytes[owner] -= answer.size
        if not self._kept[owner]:
            del self._kept[owner], self._kept_bytes[owner]
