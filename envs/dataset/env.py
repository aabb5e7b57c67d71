"""Base class of data set envs.

Invariants: training draws rows from the env's generator; evaluation enumerates held-out rows before any repeats.
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import gymnasium
import numpy as np
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from pydantic import Field, field_validator

from offbeat.envs.config import Config
from offbeat.envs.dataset.rows import Row, Rows, load_rows
from offbeat.envs.parsing import compile_pattern
from offbeat.envs.registry import GROUND_TRUTH, REWARD_ROW

MAX_CHARS = 1_000_000
PLAIN = (str, int, float, list, dict)
"""Values of columns that rewards can take."""
CHARSET = "".join(map(chr, (9, 10, 13, *range(32, 0xD800))))


class QuestionsConfig(Config):
    dataset_name: Path
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, a `datasets` folder, or a dataset of the hub
    (`ORGANIZATION/NAME[:CONFIG/SPLIT][@REVISION]`).
    """
    val_dataset_name: Path | None = None
    """Evaluation data set; None holds out one question in eight."""
    question_key: str = "question"
    answer_key: str = "answer"
    """Column names."""
    prompt: str = "{question}"
    """Observation; `{question}` is the row's question."""
    split: Literal["train", "held_out", "any"] = "train"
    """Training never uses held-out questions."""
    format_penalty: float = Field(default=0.0, le=0)
    """Reward of a response without an answer."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_question(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("has no {question}: the policy would not see the question")
        return prompt


class Judgement(NamedTuple):
    reward: float
    success: bool
    valid: bool = True
    """Whether the text contains an answer."""
    feedback: str = ""
    """Last observation."""
    metrics: Mapping[str, float] = MappingProxyType({})


C = TypeVar("C", bound=QuestionsConfig)


class QuestionEnv(gymnasium.Env[str, str], Generic[C]):
    """Single-turn env over data set rows."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # pyright: ignore[reportIncompatibleVariableOverride]
    system_prompt: str = "Answer the question."

    def __init__(self, config: C) -> None:
        self.config = config
        self.render_mode = "ansi"
        self._rows = _load_split(config)
        self._row: Row | None = None

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET)

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET[3:98])

    @abstractmethod
    def judge(self, row: Row, answer: str) -> Judgement:
        """Score an answer."""

    @property
    def row(self) -> Row:
        """Raises RuntimeError before `reset`."""
        if self._row is None:
            raise RuntimeError("call reset() before step() and render()")
        return self._row

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        index = self._index(seed, self.np_random)
        self._row = self._rows[index]
        return self._question(), {REWARD_ROW: self._reward_row(self._row)}

    def _reward_row(self, row: Row) -> dict[str, Any]:
        """Return the columns that rewards can take."""
        columns: dict[str, Any] = {
            key: value for key, value in row.items() if value is None or isinstance(value, PLAIN)
        }
        return {**columns, GROUND_TRUTH: row[self.config.answer_key]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        judgement = self.judge(self.row, action)
        penalty = 0.0 if judgement.valid else self.config.format_penalty
        info = {
            "success": judgement.success,
            "action_is_valid": judgement.valid,
            "format_penalty": penalty,
            **judgement.metrics,
        }
        return judgement.feedback, judgement.reward + penalty, True, False, info

    def task_id(self, seed: int) -> str:
        return self._rows.row_id(self._index(seed, seeding.np_random(seed)[0]))

    def render(self) -> str:
        return f"{self._question()}\n[{self.row[self.config.answer_key]}]"

    def _question(self) -> str:
        return self.config.prompt.replace("{question}", str(self.row[self.config.question_key]))

    def _index(self, seed: int | None, rng: np.random.Generator) -> int:
        if self.config.split == "held_out" and seed is not None:
            return seed % len(self._rows)
        return int(rng.integers(len(self._rows)))


def last_group(pattern: str, text: str) -> str | None:
    """Return the last match that has the group, or None; of two groups, the second."""
    compiled = compile_pattern(pattern)
    groups = [group for match in compiled.find_all(text) if (group := match[compiled.groups]) is not None]
    return groups[-1].strip() if groups else None


def _load_split(config: QuestionsConfig) -> Rows:
    path, split = config.dataset_name, config.split
    if config.val_dataset_name is not None:
        path, split = (config.val_dataset_name if split == "held_out" else path), "any"
    return load_rows(path, config.question_key, config.answer_key, split)
