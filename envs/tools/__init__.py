"""Tools around any env."""

from offbeat.envs.tools.env import ToolEnv, ToolEnvConfig

__all__ = ["ToolEnv", "ToolEnvConfig"]
