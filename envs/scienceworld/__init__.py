"""ScienceWorld (arXiv:2203.07540) as a text env."""

from offbeat.envs.scienceworld.env import ScienceWorldConfig, ScienceWorldEnv

__all__ = ["ScienceWorldConfig", "ScienceWorldEnv"]
