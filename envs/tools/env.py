"""Any env with tools in front of it: an answer that calls a tool goes to the tool, any other to the env.

Invariant: the env underneath never hears of a call; its rewards and its end are its own.
"""

from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from pydantic import Field, JsonValue

from envs import registry
from envs.config import Config
from envs.contract import random_answer
from envs.tools.calling import AnyTool, OpenTool


class ToolEnvConfig(Config):
    """`env_config` of a tag with `env_type: tools`; keys of the rewards are ROLL's."""

    env_type: str
    """The env underneath."""
    env_config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    tools: tuple[AnyTool, ...] = Field(min_length=1)
    """Each with `tool_id: python_code | search | mcp` and its settings. Where an answer calls several, the first of this
    list is used."""
    max_tool_uses: int = Field(default=10, ge=1)
    """Of an episode; a later call is told so, and is not made."""
    tool_reward: float = 0.0
    """For each call."""
    tool_success_reward: float = 0.0
    """For each call that did not fail, on top."""
    split: str | None = Field(default=None, pattern="^(train|held_out|any)$")
    """Handed down to the env underneath, if it has that setting."""


class ToolEnv(gymnasium.Env[str, str]):
    """The env underneath, with tools."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class: ClassVar[type[ToolEnvConfig]] = ToolEnvConfig

    def __init__(self, config: ToolEnvConfig) -> None:
        """Raises ValueError where the env underneath can't be made."""
        self.config = config
        settings = dict(config.env_config)
        if config.split is not None and "split" in registry.settings_of(config.env_type):
            settings.setdefault("split", config.split)
        self._env = registry.make(config.env_type, settings)
        inner = cast(Any, self._env.unwrapped)
        self._tools: list[OpenTool] = []
        for tool in config.tools:
            try:
                self._tools.append(tool.open())
            except ValueError:
                self.close()
                raise
        told = [getattr(inner, "system_prompt", ""), *(tool.instruction for tool in self._tools)]
        self.system_prompt = "\n".join(text for text in told if text)
        modes = cast(dict[str, str], getattr(inner, "metrics_agg_mode", {}))
        self.metrics_agg_mode = {**modes, "tool_use_counter": "sum", "tool_success_counter": "sum"}
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        if hasattr(inner, "task_id"):
            self.task_id = inner.task_id
        self._uses = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin; see `gymnasium.Env.reset`."""
        super().reset(seed=seed, options=options)
        self._uses = 0
        return self._env.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Use a tool, or answer the env underneath."""
        calls = [(tool, text) for tool in self._tools if (text := tool.called(action)) is not None]
        if calls:
            tool, text = next((call for call in calls if call[0].takes(call[1])), calls[0])
            self._uses += 1
            if self._uses > self.config.max_tool_uses:
                told = f"no tool can be used any more ({self.config.max_tool_uses} uses): give the answer"
                return told, 0.0, False, False, _counted(used=0, ok=0)
            result = tool.use(text)
            reward = self.config.tool_reward + self.config.tool_success_reward * result.ok
            return result.text, reward, False, False, _counted(used=1, ok=int(result.ok))
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), terminated, truncated, {**info, **_counted(used=0, ok=0)}

    def random_answer(self, rng: np.random.Generator) -> str:
        """One to the env underneath."""
        return random_answer(self._env, rng)

    def close(self) -> None:
        """Let go of the env underneath and of the tools."""
        self._env.close()
        while self._tools:
            self._tools.pop().close()


def _counted(*, used: int, ok: int) -> dict[str, Any]:
    return {"tool_use_counter": used, "tool_success_counter": ok}
