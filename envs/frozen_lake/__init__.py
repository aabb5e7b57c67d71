"""FrozenLake as text."""

from offbeat.envs.frozen_lake.env import WORDS, FrozenLakeConfig, FrozenLakeEnv

__all__ = ["WORDS", "FrozenLakeConfig", "FrozenLakeEnv"]
