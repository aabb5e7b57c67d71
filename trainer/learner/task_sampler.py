"""The learner's side of a task sampler: told of each trained group, it tells workers and checkpoints what it knows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.envs.task_samplers import TaskSampler
from offbeat.services.messages.types import Group

FILE = Path("state", "task_sampler.json")


class SamplerStateStore(Protocol):
    """The buffer as the curriculum needs it."""

    def teach(self, state: str) -> None: ...


class Curriculum:
    """Without a sampler it does nothing."""

    def __init__(self, sampler: TaskSampler | None, buffer: SamplerStateStore) -> None:
        self._sampler = sampler
        self._buffer = buffer

    def seen(self, groups: Sequence[Group]) -> None:
        """These were trained, in this order, or refilled because all their members did equally well, which says most of all
        how hard their task is; groups that start from now on are drawn by what was learnt."""
        if self._sampler is None:
            return
        for group in groups:
            rewards = [trajectory.reward for trajectory in group.trajectories]
            successes = [trajectory.metrics.get("success", 0.0) for trajectory in group.trajectories]
            self._sampler.learn(group.tag, group.seed, rewards, successes)
        self.tell()

    def tell(self) -> None:
        """Have workers draw by what the sampler knows."""
        if self._sampler is not None:
            self._buffer.teach(json.dumps(self._sampler.state_dict()))

    def save(self, folder: Path) -> None:
        """Write what it knows into a checkpoint's folder."""
        if self._sampler is not None:
            (folder / FILE).parent.mkdir(exist_ok=True)
            (folder / FILE).write_text(json.dumps(self._sampler.state_dict()))

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint's folder; one that was written without a sampler starts it afresh.

        Raises:
            ValueError: it holds what another sampler knew.
        """
        if self._sampler is None or not (folder / FILE).is_file():
            return
        try:
            self._sampler.load_state_dict(json.loads((folder / FILE).read_text()))
        except (KeyError, TypeError, AttributeError) as error:
            name = type(self._sampler).__qualname__
            raise ValueError(f"{folder / FILE} is not a state of {name} ({type(error).__name__}: {error})") from error
