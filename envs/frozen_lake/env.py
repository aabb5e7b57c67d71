"""FrozenLake as a text env.

Invariant: equal seeds and settings give equal maps and slips.
"""

from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from pydantic import Field, field_validator

from offbeat.envs.config import Config
from offbeat.envs.frozen_lake.maps import (
    ACTIONS,
    MOVES,
    Cell,
    LakeMap,
    Split,
    draw_map,
)
from offbeat.envs.frozen_lake.render import draw_lake
from offbeat.envs.parsing import WHOLE_PATTERN, ActionParser, compile_pattern

SYSTEM_PROMPT = "Walk P to G . Avoid O ."
WORDS = tuple(dict.fromkeys((*SYSTEM_PROMPT.split(), "_", "#", *ACTIONS, *"0123456789")))
"""For a word-level tokenizer (up to 9 x 9)."""

OBSERVATION_CHARS = "".join(sorted({*"".join(WORDS), " ", "\n"}))
ANSWER_CHARS = "".join(map(chr, range(32, 127))) + "\n\t"
MAX_ANSWER_CHARS = 100_000


class FrozenLakeConfig(Config):
    size: int = Field(default=4, ge=2, le=32)
    """Rows and columns."""
    p: float = Field(default=0.7, gt=0, le=1)
    """Probability of ice rather than a hole."""
    is_slippery: bool = False
    """A step goes in the given direction or to either side, a third each."""
    start_goal: Literal["corners", "random"] = "corners"
    """Start top left and goal bottom right, or both random."""
    split: Split = "train"
    """Training never uses held-out maps."""
    format_penalty: float = Field(default=-0.1, le=0)
    """Reward of an answer without a direction, and without a move."""
    action_pattern: str = WHOLE_PATTERN
    """Regular expression; the last group is the direction."""
    show_grid: Literal["first", "always"] = "first"
    """Turns with the grid; others show the four neighbours."""
    max_steps: int | None = Field(default=None, ge=1)
    """Turns until truncation; None: the tag's `max_steps`."""
    render_mode: Literal["ansi", "rgb_array"] | None = None

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern


class FrozenLakeEnv(gymnasium.Env[str, str]):
    """Walk to a goal around holes; reward 1 at the goal, `format_penalty` for an invalid answer, else 0."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class: ClassVar[type[FrozenLakeConfig]] = FrozenLakeConfig
    system_prompt: str = SYSTEM_PROMPT

    def __init__(self, config: FrozenLakeConfig | None = None) -> None:
        self.config = config or FrozenLakeConfig()
        self.render_mode = self.config.render_mode
        self._parse = _parser(self.config.action_pattern)
        self._lake: LakeMap | None = None
        self._agent: Cell = (0, 0)
        self._steps = 0

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(max_length=4 * self.config.size**2 + 64, charset=OBSERVATION_CHARS)

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_ANSWER_CHARS, charset=ANSWER_CHARS)

    @property
    def lake(self) -> LakeMap:
        """Raises RuntimeError before `reset`."""
        if self._lake is None:
            raise RuntimeError("call reset() before step() and render()")
        return self._lake

    @property
    def agent(self) -> Cell:
        return self._agent

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        config = self.config
        self._lake = draw_map(self.np_random, config.size, config.p, config.start_goal, config.split)
        self._agent, self._steps = self._lake.start, 0
        return f"{self.grid_text()}\n{self.neighbours_text()}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        lake, before = self.lake, self._agent
        direction = self._parse(action).action
        if direction is not None:
            self._agent = lake.neighbour(before, self._slip(direction))
        self._steps += 1
        success = self._agent == lake.goal
        penalty = 0.0 if direction is not None else self.config.format_penalty
        info = {
            "success": success,
            "action_is_valid": direction is not None,
            "action_is_effective": self._agent != before,
            "format_penalty": penalty,
        }
        truncated = self.config.max_steps is not None and self._steps >= self.config.max_steps
        return self._observation(), penalty or float(success), success or self._agent in lake.holes, truncated, info

    def task_id(self, seed: int) -> str:
        config = self.config
        rng, _ = seeding.np_random(seed)
        return draw_map(rng, config.size, config.p, config.start_goal, config.split).task_id

    def random_answer(self, rng: np.random.Generator) -> str:
        return ACTIONS[int(rng.integers(len(ACTIONS)))]

    def grid_text(self) -> str:
        lake, rows = self.lake, range(self.config.size)
        return "\n".join(" ".join(lake.cell((row, column), self._agent) for column in rows) for row in rows)

    def neighbours_text(self) -> str:
        """Return `row col Left # Down _ Right O Up _`."""
        (row, column), lake = self._agent, self.lake
        neighbours = (
            f"{name} {lake.cell((row + down, column + right), self._agent)}" for name, (down, right) in MOVES.items()
        )
        return f"{row} {column} {' '.join(neighbours)}"

    def render(self) -> str | npt.NDArray[np.uint8] | None:
        """Return text, or [height, width, 3] uint8 (`rgb_array`)."""
        if self.render_mode == "rgb_array":
            return draw_lake(self.lake, self._agent)
        return self.grid_text() if self.render_mode == "ansi" else None

    def _slip(self, direction: int) -> int:
        if not self.config.is_slippery:
            return direction
        return (direction + int(self.np_random.integers(-1, 2))) % len(ACTIONS)

    def _observation(self) -> str:
        if self.config.show_grid == "always":
            return f"{self.grid_text()}\n{self.neighbours_text()}"
        return self.neighbours_text()


@lru_cache
def _parser(pattern: str) -> ActionParser[int]:
    return ActionParser(pattern, {name: i for i, name in enumerate(ACTIONS)})
