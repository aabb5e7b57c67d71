"""Concurrency slots of episodes, with batched submission.

Invariants: an episode holds its slot until submitted, or until it waits for rewards, as at most the pool's first `count`
may; close finishes are submitted together with the next claim.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

from offbeat.services.messages.types import EpisodeKind

FLUSH_INTERVAL_S = 0.01
"""Minimum while episodes run."""


class SlotPool:
    def __init__(
        self, count: int, gather_s: float = FLUSH_INTERVAL_S, *, limits: Mapping[EpisodeKind, int] | None = None
    ) -> None:
        self._count = self._max_lent = count
        self._limits = dict(limits or {})
        self._held: Counter[EpisodeKind] = Counter()
        """Of running episodes and those to be submitted."""
        self._flush_interval_s = gather_s
        self._num_running = 0
        self._num_lent = 0
        self._finished: list[Slot] = []
        self._freed = asyncio.Event()
        self._flush_handle: asyncio.Handle | None = None
        self._next_flush_at = 0.0

    @property
    def num_running(self) -> int:
        """Return the episodes that hold a slot."""
        return self._num_running

    def resize(self, count: int) -> None:
        """Change the number of slots, but not how many episodes may wait for rewards; those beyond fewer slots finish."""
        grows, self._count = count > self._count, count
        if grows:
            self._freed.set()

    @property
    def num_free(self) -> int:
        # After a claim whose response was lost, more episodes than slots may be running.
        num_excess = max(0, self._num_lent - self._max_lent)
        return max(0, self._count - self._num_running - len(self._finished) - num_excess)

    def num_free_of(self, kind: EpisodeKind) -> int:
        return min(self.num_free, max(0, self._limits.get(kind, self._count) - self._held[kind]))

    def take(self, kind: EpisodeKind = EpisodeKind.TRAIN) -> "Slot":
        self._num_running += 1
        self._held[kind] += 1
        return Slot(self, kind)

    async def wait_for_free_slots(self) -> None:
        """Wait until slots were freed and their holders ran."""
        await self._freed.wait()
        self._freed.clear()

    def lend(self, slot: "Slot") -> None:
        self._num_running -= 1
        self._held[slot.kind] -= 1
        self._num_lent += 1
        self._schedule_flush()

    def finish(self, slot: "Slot") -> None:
        self._release(slot)
        self._finished.append(slot)
        self._schedule_flush()

    def vacate(self, slot: "Slot") -> None:
        self._release(slot)
        self._held[slot.kind] -= 1
        self._schedule_flush()

    def _release(self, slot: "Slot") -> None:
        if slot.is_lent:
            self._num_lent -= 1
            self._held[slot.kind] += 1
        else:
            self._num_running -= 1

    def _schedule_flush(self) -> None:
        loop = asyncio.get_running_loop()
        if self._flush_handle:
            if self._num_running:
                return
            self._flush_handle.cancel()
        wait_s = self._next_flush_at - loop.time() if self._num_running else 0.0
        # Even without a wait, all episodes that finish in this iteration of the event loop are included.
        self._flush_handle = loop.call_later(max(wait_s, 0.0), self._submit_finished)

    def _submit_finished(self) -> None:
        self._flush_handle = None
        self._next_flush_at = asyncio.get_running_loop().time() + self._flush_interval_s
        finished, self._finished = self._finished, []
        for slot in finished:
            self._held[slot.kind] -= 1
            slot.flush()
        self._freed.set()


class Slot:
    __slots__ = ("_flushed", "_is_running", "_pool", "is_lent", "kind")

    def __init__(self, pool: SlotPool, kind: EpisodeKind) -> None:
        self._pool = pool
        self.kind = kind
        self._is_running = True
        self.is_lent = False
        self._flushed = asyncio.get_running_loop().create_future()

    def lend(self) -> None:
        """Free the slot while this episode waits for rewards."""
        self._pool.lend(self)
        self.is_lent = True

    async def finish_and_wait_for_flush(self) -> None:
        """Free the slot; return when the episode may be submitted."""
        self._is_running = False
        self._pool.finish(self)
        await self._flushed

    def leave(self) -> None:
        if self._is_running:
            self._is_running = False
            self._pool.vacate(self)

    def flush(self) -> None:
        """Release the episode for submission unless cancelled."""
        if not self._flushed.done():
            self._flushed.set_result(None)
