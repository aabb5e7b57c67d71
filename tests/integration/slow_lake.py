"""FrozenLake with slow steps, so that weights change while episodes are played."""

import time
from typing import Any

from offbeat.envs.frozen_lake.env import WORDS, FrozenLakeEnv

__all__ = ["WORDS", "SlowLake"]


class SlowLake(FrozenLakeEnv):
    def step(self, action: str) -> Any:
        time.sleep(0.1)
        return super().step(action)
