"""Adapter for GEM (arXiv:2510.01051)."""

from typing import Any, ClassVar, cast

import numpy as np
from pydantic import Field, JsonValue

from offbeat.envs.adapters.text import PrivateRandomState, TextEnv, select_numbers
from offbeat.envs.config import Config
from offbeat.envs.optional_imports import require

INSTALL = (
    "uv pip install --no-deps gem-llm (its pins clash with Hydra's), beside 'offbeat[data,textarena,reasoning-gym]'"
)


class GemConfig(Config):
    id: str
    """Id, such as `game:GuessTheNumber-v0`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of `gem.make`."""
    success_reward: float = 1.0
    """Minimum last reward of a success."""


class GemEnv(TextEnv):
    """GEM env; not for threads, as many use global generators."""

    config_class: ClassVar[type[GemConfig]] = GemConfig

    def __init__(self, config: GemConfig) -> None:
        """Raises ValueError for an unknown env."""
        super().__init__()
        self.config, library = config, require("gem", "", INSTALL)
        self._random_state = PrivateRandomState()
        try:
            self._env: Any = library.make(config.id, **config.kwargs)
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise ValueError(f"gem.make({config.id!r}): {error}") from error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        env_seed = int(self.np_random.integers(2**31))
        self._random_state.seed(env_seed)
        with self._random_state():
            observation, _ = self._env.reset(seed=env_seed)
        return str(observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._random_state():
            observation, reward, terminated, truncated, info = self._env.step(action)
        numbers = select_numbers(cast(dict[str, Any], info or {}))
        success = bool(terminated) and float(reward) >= self.config.success_reward
        return str(observation), float(reward), bool(terminated), bool(truncated), {**numbers, "success": success}

    def random_answer(self, rng: np.random.Generator) -> str:
        random_state = PrivateRandomState()
        random_state.seed(int(rng.integers(2**31)))
        with random_state():
            try:
                return str(self._env.sample_random_action())
            except NotImplementedError:
                return str(rng.integers(10))
