"""Learner side of task samplers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.envs.task_samplers import TaskSampler
from offbeat.services.messages.types import Group
from offbeat.trainer.learner.episode_success import reports_success

FILE = Path("state", "task_sampler.json")


class SamplerStateStore(Protocol):
    def teach(self, state: str) -> None: ...


class Curriculum:
    """Inactive without a sampler."""

    def __init__(self, sampler: TaskSampler | None, buffer: SamplerStateStore) -> None:
        self._sampler = sampler
        self._buffer = buffer

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the sampler with groups in training order, refilled ones included; publish its state."""
        if self._sampler is None:
            return
        for group in groups:
            rewards = [trajectory.reward for trajectory in group.trajectories]
            successes = [t.metrics["success"] if reports_success(t) else 0.0 for t in group.trajectories]
            self._sampler.learn(group.tag, group.seed, rewards, successes)
        self.publish()

    def publish(self) -> None:
        if self._sampler is not None:
            self._buffer.teach(json.dumps(self._sampler.state_dict()))

    def save(self, folder: Path) -> None:
        if self._sampler is not None:
            (folder / FILE).parent.mkdir(exist_ok=True)
            (folder / FILE).write_text(json.dumps(self._sampler.state_dict()))

    def load(self, folder: Path) -> None:
        """Load a checkpoint's state; without one, reset the sampler.

        Raises:
            ValueError: another sampler's state.
        """
        if self._sampler is None or not (folder / FILE).is_file():
            return
        try:
            self._sampler.load_state_dict(json.loads((folder / FILE).read_text()))
        except (KeyError, TypeError, AttributeError) as error:
            name = type(self._sampler).__qualname__
            raise ValueError(f"{folder / FILE} is not a state of {name} ({type(error).__name__}: {error})") from error
