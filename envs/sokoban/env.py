"""Sokoban as a text env, with ROLL's keys and rewards.

Invariants: equal seeds and settings give equal rooms; every room is solvable.
"""

from functools import cached_property
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from pydantic import Field, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.parsing import WHOLE_PATTERN, ActionParser, compile_pattern
from offbeat.envs.sokoban.generator import Split, make_room
from offbeat.envs.sokoban.render import draw_room
from offbeat.envs.sokoban.rooms import ACTIONS, Room

SYMBOLS = ("#", "_", "O", "√", "X", "P", "S")
SYSTEM_PROMPT = "Push X to O ."
WORDS = tuple(dict.fromkeys((*SYSTEM_PROMPT.split(), *SYMBOLS, *ACTIONS, *map(str, range(32)))))
"""For a word-level tokenizer, with default settings."""

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n\t"
MAX_ANSWER_CHARS = 100_000


class SokobanConfig(Config):
    dim_room: tuple[int, int] = (6, 6)
    """Rows and columns, including walls."""
    num_boxes: int = Field(default=1, ge=1, le=8)
    search_depth: int = Field(default=30, ge=1)
    """Maximum moves of a solution."""
    max_steps: int | None = Field(default=None, ge=1)
    """Turns until truncation; None: the tag's `max_steps`."""
    split: Split = "train"
    """Training never uses held-out rooms."""
    grid_lookup: dict[int, str] = Field(default_factory=lambda: dict(enumerate(SYMBOLS)))
    """Cell symbols: 0 wall, 1 empty, 2 target, 3 box on target, 4 box, 5 player, 6 player on target."""
    grid_vocab: dict[str, str] = Field(default_factory=dict[str, str])
    """Symbol names in the system prompt; empty: no legend."""
    action_lookup: dict[int, str] = Field(default_factory=lambda: dict(enumerate(ACTIONS, 1)))
    """Direction words: 1 up, 2 down, 3 left, 4 right."""
    observation_format: Literal["grid", "coord", "grid_coord", "relative"] = "grid"
    """Rows of symbols; coordinates of player, boxes and targets with the player's neighbours; both; or the neighbours
    with distances to the boxes, and from these to the targets.
    """
    show_grid: Literal["first", "always"] = "always"
    """With `grid_coord`: turns with rows."""
    action_pattern: str = WHOLE_PATTERN
    """Regular expression; the last group is the direction."""
    format_penalty: float = Field(default=0.0, le=0)
    """Added reward of an answer without a direction, and without a move."""
    penalty_for_step: float = -0.1
    reward_box_on_target: float = 1.0
    penalty_box_off_target: float = -1.0
    reward_finished: float = 10.0
    render_mode: Literal["ansi", "rgb_array"] | None = None

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    @field_validator("dim_room")
    @classmethod
    def _room_has_an_inside(cls, dim_room: tuple[int, int]) -> tuple[int, int]:
        if not all(4 <= side <= 32 for side in dim_room):
            raise ValueError("rows and columns must be from 4 to 32")
        return dim_room

    @field_validator("grid_lookup", "action_lookup")
    @classmethod
    def _lookup_is_complete(cls, lookup: dict[int, str], info: Any) -> dict[int, str]:
        keys = list(range(7)) if info.field_name == "grid_lookup" else list(range(1, 5))
        if sorted(lookup) != keys:
            raise ValueError(f"needs a text for each of {', '.join(map(str, keys))}")
        if len({text.lower() for text in lookup.values()}) < len(keys) or not all(lookup.values()):
            raise ValueError("texts must differ (in more than case) and not be empty")
        return lookup

    @model_validator(mode="after")
    def _boxes_fit(self) -> "SokobanConfig":
        inside = (self.dim_room[0] - 2) * (self.dim_room[1] - 2)
        if 2 * self.num_boxes + 1 > inside:
            raise ValueError(f"{self.num_boxes} boxes, as many targets and a player need more than {inside} cells")
        if self.show_grid == "first" and self.observation_format != "grid_coord":
            raise ValueError(
                "show_grid: first shows coordinates alone on later turns: set observation_format: grid_coord"
            )
        if unknown := sorted(set(self.grid_vocab) - set(self.grid_lookup.values())):
            raise ValueError(f"grid_vocab explains {', '.join(unknown)}, which grid_lookup does not show")
        return self


class SokobanEnv(gymnasium.Env[str, str]):
    """Push boxes onto targets: reward -0.1 per step, +1 for a box on, -1 for one off, +10 at the end (gym-sokoban)."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class: ClassVar[type[SokobanConfig]] = SokobanConfig

    def __init__(self, config: SokobanConfig | None = None) -> None:
        self.config = config or SokobanConfig()
        self.render_mode = self.config.render_mode
        self.system_prompt = system_prompt(self.config)
        words = self.config.action_lookup
        self._parse = ActionParser(self.config.action_pattern, {words[i]: i - 1 for i in words})
        self._room: Room | None = None
        self._steps = 0

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        texts = (*self.config.grid_lookup.values(), *self.config.action_lookup.values())
        longest = (max(map(len, texts)) + 8) * (self.config.dim_room[0] * self.config.dim_room[1] + 32)
        return Text(max_length=longest, charset="".join(sorted({*"".join(texts), *"0123456789 \n"})))

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_ANSWER_CHARS, charset=PRINTABLE)

    @property
    def room(self) -> Room:
        """Raises RuntimeError before `reset`."""
        if self._room is None:
            raise RuntimeError("call reset() before step() and render()")
        return self._room

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._room, self._steps = self._generate(self.np_random), 0
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before, direction = self.room, self._parse(action).action
        self._room = after = before if direction is None else before.push(direction)
        self._steps += 1
        penalty = self.config.format_penalty if direction is None else 0.0
        info = {
            "success": after.is_solved,
            "action_is_valid": direction is not None,
            "action_is_effective": after is not before,
            "format_penalty": penalty,
        }
        truncated = self.config.max_steps is not None and self._steps >= self.config.max_steps
        return self._observation(), self._reward(before, after) + penalty, after.is_solved, truncated, info

    def task_id(self, seed: int) -> str:
        return self._generate(seeding.np_random(seed)[0]).task_id

    def random_answer(self, rng: np.random.Generator) -> str:
        return self.config.action_lookup[1 + int(rng.integers(len(ACTIONS)))]

    def grid_text(self) -> str:
        room, symbol = self.room, self.config.grid_lookup
        cells = [symbol[room.code(cell)] for cell in range(room.height * room.width)]
        return "\n".join(" ".join(cells[start : start + room.width]) for start in range(0, len(cells), room.width))

    def coord_text(self) -> str:
        """Return `P 2 3 Up # Down _ Left X Right _ X 2 2 O 4 1`: the player with neighbours, boxes, targets."""
        room, symbol = self.room, self.config.grid_lookup
        places = [*((4, box) for box in sorted(room.boxes)), *((2, target) for target in sorted(room.targets))]
        rest = [f"{symbol[code]} {at // room.width} {at % room.width}" for code, at in places]
        row, column = room.cell(room.player)
        return " ".join([f"{symbol[5]} {row} {column}", *self._neighbours(), *rest])

    def relative_text(self) -> str:
        """Return `Up # Down _ Left X Right _ X 0 Down 1 Left O 2 Down 1 Right`: neighbours, distances to boxes, and of each
        target from the nearest box.
        """
        room, symbol = self.room, self.config.grid_lookup
        boxes = [f"{symbol[4]} {self._describe_offset(room.player, box)}" for box in sorted(room.boxes)]
        targets = [
            f"{symbol[2]} {self._describe_offset(self._nearest_box(target), target)}" for target in sorted(room.targets)
        ]
        return " ".join([*self._neighbours(), *boxes, *targets])

    def render(self) -> str | npt.NDArray[np.uint8] | None:
        """Return text, or [height, width, 3] uint8 (`rgb_array`)."""
        if self.render_mode == "rgb_array":
            return draw_room(self.room)
        return self.grid_text() if self.render_mode == "ansi" else None

    def _neighbours(self) -> list[str]:
        room, symbol, words = self.room, self.config.grid_lookup, self.config.action_lookup
        cells = [room.player + room.offset(action) for action in range(len(ACTIONS))]
        return [f"{words[action + 1]} {symbol[room.code(cell)]}" for action, cell in enumerate(cells)]

    def _nearest_box(self, target: int) -> int:
        row, column = self.room.cell(target)
        places = [(self.room.cell(box), box) for box in sorted(self.room.boxes)]
        return min(places, key=lambda place: abs(place[0][0] - row) + abs(place[0][1] - column))[1]

    def _describe_offset(self, start: int, end: int) -> str:
        """Return `1 Up 0 Right`, rows and columns between cells."""
        words = self.config.action_lookup
        (row, column), (to_row, to_column) = self.room.cell(start), self.room.cell(end)
        vertical, horizontal = words[1 if to_row < row else 2], words[3 if to_column < column else 4]
        return f"{abs(to_row - row)} {vertical} {abs(to_column - column)} {horizontal}"

    def _generate(self, rng: np.random.Generator) -> Room:
        config = self.config
        return make_room(rng, config.dim_room, config.num_boxes, config.search_depth, config.split)

    def _reward(self, before: Room, after: Room) -> float:
        config, gained = self.config, len(after.boxes & after.targets) - len(before.boxes & before.targets)
        reward = config.penalty_for_step
        if gained:
            reward += config.reward_box_on_target if gained > 0 else config.penalty_box_off_target
        return reward + (config.reward_finished if after.is_solved else 0.0)

    def _observation(self) -> str:
        match self.config.observation_format:
            case "grid":
                return self.grid_text()
            case "coord":
                return self.coord_text()
            case "relative":
                return self.relative_text()
            case "grid_coord" if self._steps and self.config.show_grid == "first":
                return self.coord_text()
            case "grid_coord":
                return f"{self.grid_text()}\n{self.coord_text()}"


def system_prompt(config: SokobanConfig) -> str:
    symbol = config.grid_lookup
    prompt = f"Push {symbol[4]} to {symbol[2]} ."
    if config.grid_vocab:
        legend = ", ".join(f"{symbol} {meaning}" for symbol, meaning in config.grid_vocab.items())
        prompt += f" The room: {legend}. Answer with one of {', '.join(config.action_lookup.values())}."
    return prompt
