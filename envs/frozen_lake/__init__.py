"""FrozenLake in words: a random grid with holes, walked turn by turn."""

from offbeat.envs.frozen_lake.env import WORDS, FrozenLakeConfig, FrozenLakeEnv

__all__ = ["WORDS", "FrozenLakeConfig", "FrozenLakeEnv"]
