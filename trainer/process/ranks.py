"""Ranks of a learner.

Invariant: all ranks repeat the trainer calls of rank 0, in order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgpack
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import CONTINUE, STOP, Ranks, broadcast
from offbeat.trainer.training.optimizer_step import Gauges
from offbeat.trainer.training.step_tokens import StepTokens
from offbeat.trainer.training.trainer import Trainer
from offbeat.trainer.warm_start.train import Progress


class RankZeroTrainer:
    """Trainer that broadcasts each call."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks

    @property
    def kl_coef(self) -> float:
        return self._trainer.kl_coef

    @property
    def last_step(self) -> StepTokens | None:
        return self._trainer.last_step

    def begin(self, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        """Broadcast `should_stop`, so that ranks stop together."""
        self._broadcast("begin")
        return self._trainer.begin(progress, self._shared(should_stop))

    def set_learning_rate(self, learning_rate: float) -> None:
        self._broadcast("set_learning_rate", learning_rate)
        self._trainer.set_learning_rate(learning_rate)

    def train(self, batch: StepBatch) -> Gauges:
        self._broadcast("train", batch.pack())
        return self._trainer.train(batch)

    def evaluate(self, groups: Sequence[Group]) -> Gauges:
        self._broadcast("evaluate", [pack_group(group) for group in groups])
        return self._trainer.evaluate(groups)

    def tensors(self, *, with_base: bool = True) -> Iterator[tuple[str, Tensor]]:
        self._broadcast("tensors", with_base)
        yield from self._trainer.tensors(with_base=with_base)

    def offload_states(self) -> None:
        self._broadcast("offload_states")
        self._trainer.offload_states()

    def load_states(self) -> None:
        self._broadcast("load_states")
        self._trainer.load_states()

    def save(self, folder: Path) -> None:
        self._broadcast("save", str(folder))
        self._trainer.save(folder)

    def load(self, folder: Path, kl_coef: float, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        """Broadcast `should_stop`, as in `begin`."""
        self._broadcast("load", str(folder), kl_coef)
        return self._trainer.load(folder, kl_coef, progress, self._shared(should_stop))

    def stop_followers(self) -> None:
        self._broadcast("stop")

    def _shared(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: broadcast(self._ranks, STOP if should_stop() else CONTINUE) == STOP

    def _broadcast(self, *command: object) -> None:
        broadcast(self._ranks, cast(bytes, msgpack.packb(command)))


@contextmanager
def lead(trainer: Trainer, ranks: Ranks) -> Iterator[Trainer]:
    """Yield a broadcasting trainer; stop the followers on success."""
    if ranks.is_alone:
        yield trainer
        return
    leader = RankZeroTrainer(trainer, ranks)
    yield leader
    leader.stop_followers()


def follow_rank_zero(trainer: Trainer, ranks: Ranks, config: AlgorithmConfig) -> None:
    """Repeat rank 0's calls until it stops."""
    while True:
        name, *arguments = cast(list[Any], msgpack.unpackb(broadcast(ranks)))
        match name:
            case "begin":
                trainer.begin(_show_nothing, lambda: broadcast(ranks) == STOP)
            case "set_learning_rate":
                trainer.set_learning_rate(arguments[0])
            case "train":
                trainer.train(StepBatch.unpack(arguments[0], config))
            case "evaluate":
                trainer.evaluate([unpack_group(group) for group in arguments[0]])
            case "tensors":
                for _ in trainer.tensors(with_base=arguments[0]):
                    pass
            case "offload_states":
                trainer.offload_states()
            case "load_states":
                trainer.load_states()
            case "save":
                trainer.save(Path(arguments[0]))
            case "load":
                trainer.load(Path(arguments[0]), arguments[1], _show_nothing, lambda: broadcast(ranks) == STOP)
            case _:
                return


def _show_nothing(_done: int, _total: int) -> None:
    """Leave progress to rank 0."""
