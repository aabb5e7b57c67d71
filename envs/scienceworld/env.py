"""ScienceWorld as a text env: experiments of elementary science, by one action a turn.

Invariants: a seed picks a task, then a variation of its split; the rewards of an episode sum to its score.
"""

from typing import Any, ClassVar, Literal, cast

import numpy as np
from gymnasium.utils import seeding
from pydantic import Field, field_validator

from offbeat.envs.adapters.text import TextEnv
from offbeat.envs.config import Config
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import WHOLE_PATTERN, compile_pattern
from offbeat.envs.scienceworld.simulator import Simulator, find_java

Simplification = Literal[
    "easy", "teleportAction", "openDoors", "openContainers", "selfWateringFlowerPots", "noElectricalAction"
]

ACTIONS = (
    "look around, look at OBJ, look in OBJ, read OBJ, inventory, task, go to LOC, open OBJ, close OBJ, pick up OBJ, "
    "put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, dunk OBJ in OBJ, mix OBJ, activate OBJ, deactivate OBJ, "
    "use OBJ on OBJ, connect OBJ to OBJ, disconnect OBJ, eat OBJ, flush OBJ, focus on OBJ, wait, wait1"
)
SYSTEM_PROMPT = (
    "You do an experiment of elementary science in a house with a workshop, a greenhouse and a foundry. Answer with one "
    f"action per turn: {ACTIONS}{{teleport}}. OBJ is an object that you see, LOC a room behind an open door; wait takes "
    "ten steps, wait1 one. Focus on an object only where the task says so: focusing on a wrong one fails it. If you are "
    "asked which of several actions you meant, answer with its number."
)
UNKNOWN_ACTION = "No known action matches that input."
ELECTRICAL = ("power-component", "conductivity")


class ScienceWorldConfig(Config):
    tasks: tuple[str, ...] = ()
    """Names or ids, such as `boil` or `1-1`; empty: all 30."""
    variations: tuple[int, int] | None = None
    """First and last variation of each task, within the split; None: all."""
    split: Literal["train", "held_out", "test", "any"] = "train"
    """ScienceWorld's own split of a task's variations; `held_out` is its dev."""
    simplifications: tuple[Simplification, ...] = ()
    """`easy`, or some of the others."""
    show_actions: bool = False
    """Append the valid actions, about a hundred and up to hundreds, to each observation."""
    action_pattern: str = WHOLE_PATTERN
    """Regular expression; the last group is the action."""
    format_penalty: float = Field(default=0.0, le=0)
    """Reward of an answer that is no action."""
    failure_reward: float = Field(default=0.0, ge=-1, le=0)
    """Sum of a failed episode's rewards; ScienceWorld's own is -1."""
    max_steps: int | None = Field(default=None, ge=1)
    """Turns until truncation; None: the tag's `max_steps`."""

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    @field_validator("simplifications")
    @classmethod
    def _easy_stands_alone(cls, names: tuple[Simplification, ...]) -> tuple[Simplification, ...]:
        if "easy" in names and len(names) > 1:
            raise ValueError("easy stands for a set of simplifications: name it alone, or the others without it")
        return names


class ScienceWorldEnv(TextEnv):
    """Experiments of elementary science; rewards are changes of the score, from 0 to 1. `success` is 1.

    The simulator runs in a Java process, which the envs of a process share and `reset` starts.
    """

    config_class: ClassVar[type[ScienceWorldConfig]] = ScienceWorldConfig
    metrics_agg_mode: ClassVar[dict[str, str]] = {"score": "last"}

    def __init__(self, config: ScienceWorldConfig | None = None) -> None:
        """Raises ValueError without Java or the package, and for an unknown task."""
        self.config = config or ScienceWorldConfig()
        find_java()
        self._tasks = _find_tasks(self.config)
        can_teleport = {"easy", "teleportAction"} & set(self.config.simplifications)
        super().__init__(SYSTEM_PROMPT.format(teleport=", teleport to LOC" if can_teleport else ""))
        self._pattern = compile_pattern(self.config.action_pattern)
        self._started: Simulator | None = None
        self._observation = ""
        self._total = 0.0
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        task, variation = self._draw(self.np_random)
        self._simulator.load(task, variation, self.config.simplifications)
        self._observation, _, _ = self._simulator.step("look around")
        self._total, self._steps = 0.0, 0
        return self._shown(f"{self._simulator.task_description()}\n\n{self._observation}"), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._observation, score, is_over = self._simulator.step(self._parse(action))
        is_valid = self._observation != UNKNOWN_ACTION
        total = score if score >= 0 else self.config.failure_reward
        penalty = 0.0 if is_valid else self.config.format_penalty
        reward, self._total = total - self._total + penalty, total
        info = {"success": score >= 1, "score": score, "action_is_valid": is_valid, "format_penalty": penalty}
        is_over = is_over or score < 0
        is_truncated = not is_over and self.config.max_steps is not None and self._steps >= self.config.max_steps
        return (self._observation if is_over else self._shown(self._observation)), reward, is_over, is_truncated, info

    def task_id(self, seed: int) -> str:
        task, variation = self._draw(seeding.np_random(seed)[0])
        return f"{task} {variation}"

    def random_answer(self, rng: np.random.Generator) -> str:
        actions = [action for action in self._simulator.valid_actions() if action != "reset task"]
        return actions[int(rng.integers(len(actions)))]

    def close(self) -> None:
        if self._started is not None:
            simulator, self._started = self._started, None
            simulator.close()

    @property
    def _simulator(self) -> Simulator:
        if self._started is None:
            self._started = Simulator.start()
        return self._started

    def _draw(self, rng: np.random.Generator) -> tuple[str, int]:
        task = self._tasks[int(rng.integers(len(self._tasks)))]
        numbers = self._simulator.variations(task, self.config.split)
        if self.config.variations is not None:
            first, last = self.config.variations
            chosen = [number for number in numbers if first <= number <= last]
            if not chosen:
                raise ValueError(
                    f"variations: [{first}, {last}] has none of {task}'s in split {self.config.split!r}, which are "
                    f"{min(numbers)} to {max(numbers)}"
                )
            numbers = chosen
        return task, numbers[int(rng.integers(len(numbers)))]

    def _parse(self, answer: str) -> str:
        """Return the action, empty if the answer has none."""
        match = self._pattern.search(answer)
        text = match[match.lastindex or 0] if match else ""
        return " ".join((text or "").encode(errors="replace").decode().split())

    def _shown(self, text: str) -> str:
        if not self.config.show_actions:
            return text
        return f"{text}\n\nActions: {', '.join(self._simulator.valid_actions())}"


def _find_tasks(config: ScienceWorldConfig) -> tuple[str, ...]:
    names = cast(dict[str, str], require("scienceworld.constants", "scienceworld").ID2TASK)
    known = set(names.values())
    tasks = tuple(names.get(task, task) for task in config.tasks) or tuple(names.values())
    if unknown := [task for task in tasks if task not in known]:
        raise ValueError(f"tasks: ScienceWorld has no {unknown[0]!r}; its tasks are {', '.join(sorted(known))}")
    if "noElectricalAction" in config.simplifications:
        for task in tasks:
            if any(word in task for word in ELECTRICAL):
                raise ValueError(f"simplifications: {task} needs electrical actions, which noElectricalAction removes")
    return tasks
