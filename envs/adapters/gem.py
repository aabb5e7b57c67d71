"""Adapter for GEM (arXiv:2510.01051)."""

from collections.abc import Mapping
from contextlib import suppress
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
    """Minimum last reward of a success; lower for games that pay less than 1 for the winning move, as Wordle (.5) and
    2048 (the move's share of the progress).
    """


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
            observation, info = self._env.reset(seed=env_seed)
        return _render(observation, info or {}), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._random_state():
            observation, reward, terminated, truncated, info = self._env.step(action)
        info = cast(dict[str, Any], info or {})
        success = bool(terminated) and float(reward) >= self.config.success_reward
        metrics = {**select_numbers(info), "success": success}
        return _render(observation, info), float(reward), bool(terminated), bool(truncated), metrics

    def random_answer(self, rng: np.random.Generator) -> str:
        random_state = PrivateRandomState()
        random_state.seed(int(rng.integers(2**31)))
        with random_state():
            try:
                return str(self._env.sample_random_action())
            except NotImplementedError:
                return str(rng.integers(10))

    def close(self) -> None:
        with suppress(AttributeError):  # most envs have no `close`; MathEnv's fails with `use_mp: false`
            self._env.close()


def _render(observation: object, info: Mapping[str, Any]) -> str:
    """Put an observation between the prefix and suffix of `info`, as GEM's `ObservationWrapper` does."""
    text, suffix = str(observation), str(info.get("suffix", ""))
    newline = "\n" if text and suffix and not text.endswith("\n") else ""
    return f"{info.get('prefix', '')}{text}{newline}{suffix}"
