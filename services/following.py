"""A thread that follows a stream of the run beside whatever its process does."""

import threading
from abc import ABC, abstractmethod
from typing import Self

LAST_ROUND_S = 10.0


class Follower(ABC):
    """Follows for the time of its context, then writes what has come by its end."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is in the stream by now, then end."""
        self._stop.set()
        self._thread.join(timeout=LAST_ROUND_S)

    @abstractmethod
    def _follow(self) -> None:
        """Until `_stop` is set and nothing is left to read."""
