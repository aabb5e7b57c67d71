"""Sokoban as text."""

from offbeat.envs.sokoban.env import WORDS, SokobanConfig, SokobanEnv

__all__ = ["WORDS", "SokobanConfig", "SokobanEnv"]
