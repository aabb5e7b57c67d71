"""FrozenLake as text: a random grid with holes."""

from offbeat.envs.frozen_lake.env import WORDS, FrozenLakeConfig, FrozenLakeEnv

__all__ = ["WORDS", "FrozenLakeConfig", "FrozenLakeEnv"]
