"""The loop's interface to what it trains."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.training.optimizer_step import Gauges
from offbeat.trainer.training.step_tokens import StepTokens
from offbeat.trainer.warm_start.train import Progress


class Trainer(Protocol):
    def begin(self, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        """Create the first weights; return False if stopped."""
        ...

    def load(self, folder: Path, kl_coef: float, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        """Restore a checkpoint, instead of `begin`; return False if stopped."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the schedule's peak."""
        ...

    def train(self, batch: StepBatch) -> Gauges: ...

    def evaluate(self, groups: Sequence[Group]) -> Gauges:
        """Return the losses of validation groups."""
        ...

    def tensors(self, *, with_base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to publish by Hugging Face name, or base and adapter, each valid until the next; exhaust
        it. with_base: False leaves out the base of a published adapter."""
        ...

    def offload_states(self) -> None:
        """Leave the devices; nothing but `load_states` may follow."""
        ...

    def load_states(self) -> None:
        """Take the devices again."""
        ...

    def save(self, folder: Path) -> None:
        """Fill a checkpoint's folder."""
        ...

    @property
    def kl_coef(self) -> float:
        """Return the KL coefficient in the reward."""
        ...

    @property
    def last_step(self) -> StepTokens | None:
        """Return tokens of the newest step; None without `console.keep_steps`."""
        ...
