"""FrozenLake with random step latency.

Envs have generators seeded by order of creation: siblings differ, runs are reproducible.
"""

import itertools
import math
import time
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from offbeat.envs.config import Config
from offbeat.envs.frozen_lake.env import WORDS, FrozenLakeConfig, FrozenLakeEnv

__all__ = ["WORDS", "Latency", "SlowLake", "SlowLakeConfig"]

Distribution = Literal["normal", "lognormal"]


class Latency(Config):
    distribution: Distribution = "normal"
    """`normal`: cut off at 0. `lognormal`: with the latency's own mean and deviation."""
    mean_s: float = Field(default=0.0, ge=0)
    std_s: float = Field(default=0.0, ge=0)

    def draw(self, rng: np.random.Generator) -> float:
        if self.mean_s == 0:
            return 0.0
        if self.distribution == "normal":
            return max(0.0, float(rng.normal(self.mean_s, self.std_s)))
        variance = math.log1p((self.std_s / self.mean_s) ** 2)
        return float(rng.lognormal(math.log(self.mean_s) - variance / 2, math.sqrt(variance)))


class SlowLakeConfig(FrozenLakeConfig):
    latency: Latency = Latency()
    latency_seed: int = 0


class SlowLake(FrozenLakeEnv):
    """FrozenLake that sleeps; requires `execution: thread`."""

    config_class: ClassVar[type[FrozenLakeConfig]] = SlowLakeConfig
    _numbers: ClassVar[Any] = itertools.count()

    def __init__(self, config: SlowLakeConfig | None = None) -> None:
        slow = config or SlowLakeConfig()
        super().__init__(slow)
        self._latency = slow.latency
        self._latency_rng = np.random.default_rng([slow.latency_seed, next(self._numbers)])

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self._latency.draw(self._latency_rng))
        return super().step(action)
