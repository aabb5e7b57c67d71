"""Sokoban in words: boxes that can be pushed and never pulled, in rooms made by playing backwards."""

from offbeat.envs.sokoban.env import WORDS, SokobanConfig, SokobanEnv

__all__ = ["WORDS", "SokobanConfig", "SokobanEnv"]
