"""Tool wrapper for any env, which never sees a call; rewards and end are unchanged."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, cast

import gymnasium
import numpy as np
from pydantic import Field, JsonValue

from offbeat.envs import registry
from offbeat.envs.config import Config
from offbeat.envs.contract import random_answer
from offbeat.envs.tools.functions import Call, read_calls, write_results
from offbeat.envs.tools.mcp_server import FAILED_CALL_END_S
from offbeat.envs.tools.tool_calls import AnyTool, McpTool, OpenTool, ToolResult, longest_call_s

MIN_CALLS_S = 20.0
"""Default time of one answer's calls, if each of them may take less."""
NO_TIME = "no time is left for this call: make fewer calls in one answer"


class ToolEnvConfig(Config):
    """`env_config` of `tools`; reward keys are ROLL's."""

    env_type: str
    """Wrapped env."""
    env_config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    tools: tuple[AnyTool, ...] = Field(min_length=1)
    """Tools, each `tool_id: python_code | search | mcp` with settings; of those called, the first listed is used."""
    function_calling: Literal["prompt", "template"] = "prompt"
    """Tools in the prompt by `instruction` and `pattern`, or as functions in the chat template's format."""
    max_tool_uses: int = Field(default=10, ge=1)
    """Calls per episode, of a seat; later ones are refused."""
    calls_timeout_s: float | None = Field(default=None, gt=0)
    """Time of one answer's calls together, s; None: 20, or the longest time of one call if that is more."""
    tool_reward: float = 0.0
    """Reward per call."""
    tool_success_reward: float = 0.0
    """Additional reward of an episode's first successful call with a result, of each seat."""
    split: str | None = Field(default=None, pattern="^(train|held_out|any)$")
    """For the wrapped env."""

    @property
    def calls_s(self) -> float:
        """Return the time of one answer's calls."""
        return self.calls_timeout_s or max(MIN_CALLS_S, *map(longest_call_s, self.tools))

    @property
    def longest_step_s(self) -> float:
        """Return the longest time of a step that calls tools."""
        return self.calls_s + (FAILED_CALL_END_S if any(isinstance(tool, McpTool) for tool in self.tools) else 0.0)


class ToolEnv(gymnasium.Env[str, str]):
    """Any env, with tools that an answer may call instead of acting."""

    config_class: ClassVar[type[ToolEnvConfig]] = ToolEnvConfig

    def __init__(self, config: ToolEnvConfig) -> None:
        """Raises ValueError if env or tool is unavailable, or the env has functions of its own."""
        self.config = config
        settings = dict(config.env_config)
        if config.split is not None and "split" in registry.setting_names(config.env_type):
            settings.setdefault("split", config.split)
        self._env = registry.make(config.env_type, settings)
        inner = cast(Any, self._env.unwrapped)
        self._tools: list[OpenTool] = []
        if getattr(inner, "functions", ()):
            self.close()
            raise ValueError(
                f"tools: {config.env_type} has functions of its own, whose calls would go to the tools: let it read texts "
                "(for harbor, `function_calling: prompt` in its env_config), or use it without `tools`"
            )
        self.metadata = self._env.metadata
        self.render_mode = self._env.render_mode
        self.seats: tuple[str, ...] = tuple(getattr(inner, "seats", ()))
        for tool in config.tools:
            try:
                self._tools.append(tool.open())
            except ValueError:
                self.close()
                raise
        by_template = config.function_calling == "template"
        instructions = [] if by_template else [tool.instruction for tool in self._tools]
        self.system_prompt = _join_lines(getattr(inner, "system_prompt", ""), *instructions)
        self.tool_instructions = _join_lines(getattr(inner, "tool_instructions", ""), *instructions)
        self._by_name: dict[str, OpenTool] = {}
        self.functions: tuple[dict[str, Any], ...] = ()
        if by_template:
            self._register_functions()
        modes = cast(dict[str, str], getattr(inner, "metrics_agg_mode", {}))
        self.metrics_agg_mode = {**modes, "tool_use_counter": "sum", "tool_success_counter": "sum"}
        if hasattr(inner, "task_id"):
            self.task_id = inner.task_id
        self._seat = ""
        self._uses: Counter[str] = Counter()
        self._paid_seats: set[str] = set()

    @property
    def words(self) -> tuple[str, ...] | None:
        """Words of the wrapped env and the prompt, for the tiny policy's tokenizer; None if that env declares none."""
        inner = self._env.unwrapped
        words = getattr(inner, "words", None)
        if words is None:
            words = getattr(sys.modules[type(inner).__module__], "WORDS", None)
        return None if words is None else tuple(dict.fromkeys((*words, *self.system_prompt.split())))

    @cached_property
    def observation_space(self) -> gymnasium.Space[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._env.observation_space

    @cached_property
    def action_space(self) -> gymnasium.Space[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._uses.clear()
        self._paid_seats.clear()
        observation, info = self._env.reset(seed=seed, options=options)
        self._seat = str(info.get("seat", "")) if self.seats else ""
        return observation, info

    def render(self) -> Any:
        return self._env.render()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        deadline = time.monotonic() + self.config.calls_s
        if self._by_name and (function_calls := read_calls(action)):
            results = [self._count_use(partial(self._call_function, call), deadline) for call in function_calls]
            return self._respond(
                write_results([result.text if result else self._limit_message for result in results]), results
            )
        calls = [(tool, text) for tool in self._tools if (text := tool.find_call(action)) is not None]
        if calls and not self._by_name:
            tool, text = next((call for call in calls if call[0].accepts(call[1])), calls[0])
            result = self._count_use(partial(tool.use, text), deadline)
            return self._respond(result.text if result else self._limit_message, [result])
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._seat = str(info.get("seat", "")) if self.seats else ""
        return observation, float(reward), terminated, truncated, {**info, **_use_metrics(used=0, ok=0)}

    def _register_functions(self) -> None:
        functions = [(function, tool) for tool in self._tools for function in tool.functions]
        self._by_name = {function.name: tool for function, tool in functions}
        self.functions = tuple(function.schema() for function, _ in functions)
        if len(self._by_name) < len(functions):
            self.close()
            names = ", ".join(function.name for function, _ in functions)
            raise ValueError(f"tools: two functions share a name: {names}")

    def _count_use(self, use: Callable[[float], ToolResult], deadline: float) -> ToolResult | None:
        self._uses[self._seat] += 1
        if self._uses[self._seat] > self.config.max_tool_uses:
            return None
        left_s = deadline - time.monotonic()
        return use(left_s) if left_s > 0 else ToolResult(NO_TIME, ok=False)

    def _call_function(self, call: Call, timeout_s: float) -> ToolResult:
        if tool := self._by_name.get(call.name):
            return tool.call_function(call, timeout_s)
        return ToolResult(f"there is no function {call.name!r}; there is {', '.join(self._by_name)}", False)

    @property
    def _limit_message(self) -> str:
        return f"no tool can be used any more ({self.config.max_tool_uses} uses): give the answer"

    def _respond(self, text: str, results: list[ToolResult | None]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        used = [result for result in results if result is not None]
        ok = sum(result.ok for result in used)
        reward = self.config.tool_reward * len(used)
        if self._seat not in self._paid_seats and any(result.ok and not result.is_empty for result in used):
            self._paid_seats.add(self._seat)
            reward += self.config.tool_success_reward
        info = _use_metrics(used=len(used), ok=ok)
        if self.seats:
            info |= {"seat": self._seat, "seats": {self._seat: {"reward": reward}}}
        return text, reward, False, False, info

    def random_answer(self, rng: np.random.Generator) -> str:
        return random_answer(self._env, rng)

    def close(self) -> None:
        self._env.close()
        while self._tools:
            self._tools.pop().close()


def _join_lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def _use_metrics(*, used: int, ok: int) -> dict[str, Any]:
    return {"tool_use_counter": used, "tool_success_counter": ok}
