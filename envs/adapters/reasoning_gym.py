"""Adapter for reasoning-gym.

Invariant: answers are scored in processes of their own, within `CPU_S`, and never run as code; past it, or if the
library's scorer raises an exception, the score is 0.
"""

import logging
import os
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from gymnasium.utils import seeding
from pydantic import Field, JsonValue

from offbeat.envs.adapters.reasoning_gym_scorer import encode
from offbeat.envs.adapters.text import TextEnv
from offbeat.envs.config import Config
from offbeat.envs.dataset.env import last_group
from offbeat.envs.isolation.line_process import LineProcesses
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import compile_pattern

logger = logging.getLogger(__name__)

HELD_OUT_FROM = 1 << 30
"""First seed of held-out questions."""
PROGRAM = Path(__file__).with_name("reasoning_gym_scorer.py")
CPU_S = 1.0
"""CPU time per score, a small part of `step_timeout_s`, as scores may wait for one another."""
MAX_PROCESSES = 4
MEMORY_BYTES = 4 << 30
"""Address space."""


class ReasoningGymConfig(Config):
    dataset: str
    """Data set, such as `chain_sum`."""
    dataset_config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Data set settings."""
    answer_pattern: str = "<answer>(.*?)</answer>"
    split: Literal["train", "held_out"] = "train"
    """Split, disjoint in seeds."""
    format_penalty: float = Field(default=0.0, le=0)


class ReasoningGymEnv(TextEnv):
    """Procedural question of reasoning-gym, scored in [0, 1]; `success` is 1."""

    config_class: ClassVar[type[ReasoningGymConfig]] = ReasoningGymConfig
    system_prompt: str = "Think, then give the answer in <answer> </answer>."

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises ValueError for an unknown data set or invalid settings."""
        super().__init__()
        compile_pattern(config.answer_pattern)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            self._library: Any = require("reasoning_gym", "reasoning-gym")
        self.config = config
        self._question_seed = 0
        self._entry: dict[str, Any] = {}
        self._coded_entry: Any = None
        self._create_question(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._create_question(self._draw_seed(self.np_random))
        return str(self._entry["question"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = last_group(self.config.answer_pattern, action)
        score = 0.0 if answer is None else self._score(answer)
        penalty = self.config.format_penalty if answer is None else 0.0
        info = {"success": score == 1.0, "action_is_valid": answer is not None, "format_penalty": penalty}
        return "", score + penalty, True, False, info

    def task_id(self, seed: int) -> int:
        return self._draw_seed(seeding.np_random(seed)[0])

    def _draw_seed(self, rng: Any) -> int:
        offset = HELD_OUT_FROM if self.config.split == "held_out" else 0
        return offset + int(rng.integers(HELD_OUT_FROM))

    def _create_question(self, question_seed: int) -> None:
        config = self.config
        try:
            dataset = self._library.create_dataset(config.dataset, seed=question_seed, size=1, **config.dataset_config)
            self._question_seed, self._entry = question_seed, dataset[0]
            self._coded_entry = encode(self._entry)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym's {config.dataset!r}: {error}") from error

    def _score(self, answer: str) -> float:
        """Raises RuntimeError if the data set can't be created."""
        config = self.config
        reply = _scorers_of(os.getpid()).ask(
            {
                "dataset": config.dataset,
                "config": config.dataset_config,
                "seed": self._question_seed,
                "entry": self._coded_entry,
                "answer": answer,
            }
        )
        match reply:
            case None:
                return 0.0
            case {"score": score}:
                return score
            case {"error": error}:
                if config.dataset not in _warned_of:
                    _warned_of.add(config.dataset)
                    text = (
                        "reasoning_gym: scorer of %r failed for the answer %r, worth 0: %s (logged once per data set)"
                    )
                    logger.warning(text, config.dataset, answer[:100], error)
                return 0.0
            case _:
                raise RuntimeError(f"reasoning_gym's {config.dataset!r}: {reply['failure']}")


_warned_of: set[str] = set()


@lru_cache(maxsize=1)
def _scorers_of(pid: int) -> LineProcesses:  # noqa: ARG001  # a forked process must not share its parent's pipes
    # -P: the folder's own reasoning_gym.py must not shadow the library
    command = [sys.executable, "-P", "-W", "ignore", str(PROGRAM), str(CPU_S), str(MEMORY_BYTES)]
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    return LineProcesses(command, "reasoning_gym's scorer did not start: see the error above", num_processes)
