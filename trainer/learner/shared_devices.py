"""The learner's devices where engines share them: it has them from a batch to the next wait for groups."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from offbeat.trainer.training.trainer import Trainer


class Turns(Protocol):
    """Turns with engines on the same devices."""

    @property
    def is_held(self) -> bool: ...

    def begin(self, should_stop: Callable[[], bool]) -> bool:
        """Return True once all engines sleep; False if stopped before."""
        ...

    def end(self) -> None: ...


class SharedDevices:
    """Devices with the trainer's states on them, or without both."""

    def __init__(self, trainer: Trainer, turns: Turns | None = None) -> None:
        """turns: None if no engine shares the devices, which are then always held."""
        self._trainer = trainer
        self._turns = turns

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Load the states once all engines sleep; return False if stopped before."""
        if self._turns is None or self._turns.is_held:
            return True
        if not self._turns.begin(should_stop):
            return False
        self._trainer.load_states()
        return True

    def leave(self) -> None:
        """Offload the states; engines wake."""
        if self._turns is not None and self._turns.is_held:
            self._trainer.offload_states()
            self._turns.end()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the devices for a call, then leave them again unless they were held before."""
        was_held = self._turns is None or self._turns.is_held
        self.take()
        yield
        if not was_held:
            self.leave()
