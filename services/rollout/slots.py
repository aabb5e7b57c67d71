"""Concurrency slots for a worker's episodes; finished episodes are submitted in batches.

Invariants: an episode holds its slot until it is submitted; episodes that finish close together are submitted together
with the claim for new ones, because round trips to the buffer are the cost.
"""

import asyncio

GATHER_S = 0.01
"""Minimum interval of submissions while other episodes are running, s."""


class SlotPool:
    def __init__(self, count: int, gather_s: float = GATHER_S) -> None:
        self._count = count
        self._gather_s = gather_s
        self._num_playing = 0
        self._finished: list[Slot] = []
        self._freed = asyncio.Event()
        self._departure: asyncio.Handle | None = None
        self._not_before = 0.0

    @property
    def num_free(self) -> int:
        # A claim whose answer had got lost may have given more than there are places.
        return max(0, self._count - self._num_playing - len(self._finished))

    def take(self) -> "Slot":
        """Occupy a slot for a new episode."""
        self._num_playing += 1
        return Slot(self)

    async def wait_for_free_slots(self) -> None:
        """Return once slots were freed since the last call, after their former holders ran."""
        await self._freed.wait()
        self._freed.clear()

    def finish(self, place: "Slot") -> None:
        """Mark the slot's episode for the next submission."""
        self._num_playing -= 1
        self._finished.append(place)
        self._call()

    def vacate(self) -> None:
        """Free a slot without a submission."""
        self._num_playing -= 1
        self._call()

    def _call(self) -> None:
        """Schedule a submission; at once if no other episode is running."""
        loop = asyncio.get_running_loop()
        if self._departure:
            if self._num_playing:
                return
            self._departure.cancel()
        wait_s = self._not_before - loop.time() if self._num_playing else 0.0
        # Even at once is not before all that finish in this round of the loop are here.
        self._departure = loop.call_later(max(wait_s, 0.0), self._submit_finished)

    def _submit_finished(self) -> None:
        self._departure = None
        self._not_before = asyncio.get_running_loop().time() + self._gather_s
        leaving, self._finished = self._finished, []
        for place in leaving:
            place.flush()
        self._freed.set()


class Slot:
    """Slot of one episode."""

    __slots__ = ("_gate", "_is_playing", "_places")

    def __init__(self, places: SlotPool) -> None:
        self._places = places
        self._is_playing = True
        self._gate = asyncio.get_running_loop().create_future()

    async def finish_and_wait_for_flush(self) -> None:
        """Free the slot of a finished episode and return once it is submitted."""
        self._is_playing = False
        self._places.finish(self)
        await self._gate

    def leave(self) -> None:
        """End the episode, whatever its outcome."""
        if self._is_playing:
            self._is_playing = False
            self._places.vacate()

    def flush(self) -> None:
        """Submit the episode now, unless it was cancelled."""
        if not self._gate.done():
            self._gate.set_result(None)
