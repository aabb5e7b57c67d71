"""Learner side of a task sampler: reports trained groups to it, and publishes its state to workers and checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.envs.task_samplers import TaskSampler
from offbeat.services.messages.types import Group

FILE = Path("state", "task_sampler.json")


class SamplerStateStore(Protocol):
    """Interface of `Curriculum` to the buffer."""

    def teach(self, state: str) -> None: ...


class Curriculum:
    """A task sampler's state on the learner; does nothing without a sampler."""

    def __init__(self, sampler: TaskSampler | None, buffer: SamplerStateStore) -> None:
        self._sampler = sampler
        self._buffer = buffer

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the sampler with a step's groups, refilled ones included, in training order, and publish its state."""
        if self._sampler is None:
            return
        for group in groups:
            rewards = [trajectory.reward for trajectory in group.trajectories]
            successes = [trajectory.metrics.get("success", 0.0) for trajectory in group.trajectories]
            self._sampler.learn(group.tag, group.seed, rewards, successes)
        self.publish()

    def publish(self) -> None:
        """Publish the sampler's state to the workers."""
        if self._sampler is not None:
            self._buffer.teach(json.dumps(self._sampler.state_dict()))

    def save(self, folder: Path) -> None:
        """Write the sampler's state into a checkpoint's folder."""
        if self._sampler is not None:
            (folder / FILE).parent.mkdir(exist_ok=True)
            (folder / FILE).write_text(json.dumps(self._sampler.state_dict()))

    def load(self, folder: Path) -> None:
        """Load the state from a checkpoint's folder; one written without a sampler resets it.

        Raises:
            ValueError: the state is another sampler's.
        """
        if self._sampler is None or not (folder / FILE).is_file():
            return
        try:
            self._sampler.load_state_dict(json.loads((folder / FILE).read_text()))
        except (KeyError, TypeError, AttributeError) as error:
            name = type(self._sampler).__qualname__
            raise ValueError(f"{folder / FILE} is not a state of {name} ({type(error).__name__}: {error})") from error
