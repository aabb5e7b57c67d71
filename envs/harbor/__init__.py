"""Tasks in Harbor's format, in a shell of the sandbox."""

from offbeat.envs.harbor.config import HarborConfig
from offbeat.envs.harbor.env import HarborEnv

__all__ = ["HarborConfig", "HarborEnv"]
