"""Groups that the buffer gave up while they were played, as no step could train them any more."""

from offbeat.services.buffer.api import LearnerBuffer

EXPIRED = "expired"


class ExpiredGroups:
    def __init__(self, buffer: LearnerBuffer) -> None:
        self._buffer = buffer
        self._known: int | None = None

    def begin(self) -> None:
        """Leave out those of a predecessor."""
        if self._known is None:
            self._known = self._total()

    def count_new(self) -> int:
        """Return the number since the last call; none while Redis counts fewer, having lost its newest data."""
        total = self._total()
        new = total - (total if self._known is None else self._known)
        self._known = total
        return max(new, 0)

    def _total(self) -> int:
        return self._buffer.counters().dropped.get(EXPIRED, 0)
