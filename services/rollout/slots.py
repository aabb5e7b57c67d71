"""The places in which a worker plays, and when what was finished in them leaves for the buffer.

Invariants: an episode holds its place until it leaves, and no longer; those that finish soon after each other leave
together, and with them goes the claim for their places: it is trips to the buffer that cost.
"""

import asyncio

GATHER_S = 0.01
"""From one departure to the next, at least, while anybody is still playing."""


class SlotPool:
    """As many as episodes are played at a time."""

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
        """Episodes that may be claimed."""
        # A claim whose answer had got lost may have given more than there are places.
        return max(0, self._count - self._num_playing - len(self._finished))

    def take(self) -> "Slot":
        """For an episode that begins."""
        self._num_playing += 1
        return Slot(self)

    async def freed(self) -> None:
        """Return once places were freed since the last time, after those who left them had their turn."""
        await self._freed.wait()
        self._freed.clear()

    def finish(self, place: "Slot") -> None:
        """Its episode leaves at the next departure."""
        self._num_playing -= 1
        self._finished.append(place)
        self._call()

    def vacate(self) -> None:
        """A place is free without a departure."""
        self._num_playing -= 1
        self._call()

    def _call(self) -> None:
        """There will be a departure; at once, when there is nobody to wait for."""
        loop = asyncio.get_running_loop()
        if self._departure:
            if self._num_playing:
                return
            self._departure.cancel()
        wait_s = self._not_before - loop.time() if self._num_playing else 0.0
        # Even at once is not before all that finish in this round of the loop are here.
        self._departure = loop.call_later(max(wait_s, 0.0), self._depart)

    def _depart(self) -> None:
        self._departure = None
        self._not_before = asyncio.get_running_loop().time() + self._gather_s
        leaving, self._finished = self._finished, []
        for place in leaving:
            place.flush()
        self._freed.set()


class Slot:
    """Of one episode."""

    __slots__ = ("_gate", "_is_playing", "_places")

    def __init__(self, places: SlotPool) -> None:
        self._places = places
        self._is_playing = True
        self._gate = asyncio.get_running_loop().create_future()

    async def finish_and_wait_for_flush(self) -> None:
        """The episode is finished: return when it leaves. From then on its place is free."""
        self._is_playing = False
        self._places.finish(self)
        await self._gate

    def leave(self) -> None:
        """The episode is over, however it ended."""
        if self._is_playing:
            self._is_playing = False
            self._places.vacate()

    def flush(self) -> None:
        """Its episode leaves now, if it has not been cancelled meanwhile."""
        if not self._gate.done():
            self._gate.set_result(None)
