"""Adapter for OpenEnv servers, one session per env."""

import json
from typing import Any, ClassVar, cast

import numpy as np
from pydantic import Field, JsonValue

from offbeat.envs.adapters.text import TextEnv
from offbeat.envs.config import Config
from offbeat.envs.optional_imports import require

REJECTION_CODES = ("VALIDATION_ERROR", "INVALID_JSON")


class ActionRejectedError(ValueError):
    """Rejection of an action by the server."""


class OpenEnvConfig(Config):
    base_url: str
    reset: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of `reset`, besides the seed."""
    action_field: str = ""
    """Answer's field of the action; empty: the answer is the action, as JSON."""
    action: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Other fields of the action."""
    observation_field: str = ""
    """Observation field to show; empty: all, as JSON."""
    system_prompt: str = ""
    words: tuple[str, ...] = ()
    """Words of observations and answers, for the tiny policy's tokenizer, besides the prompt's."""
    success_reward: float = 1.0
    """Minimum last reward of a success."""
    format_penalty: float = Field(default=-0.1, le=0)
    """Reward of a rejected answer; the env is not stepped."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a request."""


class OpenEnvEnv(TextEnv):
    """Env of an OpenEnv server, whose actions are answers."""

    config_class: ClassVar[type[OpenEnvConfig]] = OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        """Raises ValueError without openenv-core; `reset` connects."""
        super().__init__(config.system_prompt)
        if config.words:
            self.words = tuple(dict.fromkeys((*config.words, *self.system_prompt.split())))
        self.config, self._library = config, require("openenv.core", "openenv")
        self._closed_error: type[Exception] = require("websockets.exceptions", "openenv").ConnectionClosed
        self._client: Any = None
        self._observation = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; raises ConnectionError if the server is unreachable or closed the session, RuntimeError if
        it failed.
        """
        super().reset(seed=seed, options=options)
        arguments = {**self.config.reset, "seed": int(self.np_random.integers(2**31))}
        try:
            result = self._request("reset", **arguments)
        except self._closed_error:
            result = self._reset_new_session(arguments)
        self._observation = self._text(result.observation)
        return self._observation, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Raises as `reset` does."""
        request = self._action(action)
        if request is None:
            return self._reject("the answer is not a JSON object")
        try:
            result = self._request("step", request)
        except ActionRejectedError as error:
            return self._reject(str(error))
        reward, done = float(result.reward or 0.0), bool(result.done)
        self._observation = self._text(result.observation)
        info = {
            "success": done and reward >= self.config.success_reward,
            "action_is_valid": True,
            "format_penalty": 0.0,
        }
        return self._observation, reward, done, False, info

    def random_answer(self, rng: np.random.Generator) -> str:
        return str(rng.integers(10))

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.close()

    def _reset_new_session(self, arguments: dict[str, Any]) -> Any:
        """Reset in a new session; servers close idle ones."""
        try:
            return self._request("reset", **arguments)
        except self._closed_error as error:
            raise ConnectionError(
                f"{self.config.base_url} closes new sessions at once: raise its max_concurrent_envs"
            ) from error

    def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Send a request; an error drops the session."""
        if self._client is None:
            client = self._library.GenericEnvClient(self.config.base_url, message_timeout_s=self.config.timeout_s)
            self._client = client.sync()
        try:
            return getattr(self._client, method)(*args, **kwargs)
        except Exception as error:
            if method == "step" and any(code in str(error) for code in REJECTION_CODES):
                raise ActionRejectedError(str(error)) from error
            self.close()
            raise

    def _action(self, answer: str) -> dict[str, Any] | None:
        if self.config.action_field:
            return {**self.config.action, self.config.action_field: answer}
        try:
            value: object = json.loads(answer)
        except (ValueError, RecursionError):
            return None
        return {**self.config.action, **cast(dict[str, Any], value)} if isinstance(value, dict) else None

    def _reject(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        penalty = self.config.format_penalty
        info = {"success": False, "action_is_valid": False, "format_penalty": penalty, "refused": reason}
        return self._observation, penalty, False, False, info

    def _text(self, observation: dict[str, Any]) -> str:
        name = self.config.observation_field
        if not name:
            return json.dumps(observation, ensure_ascii=False, sort_keys=True)
        if name not in observation:
            raise ValueError(f"the observation has no field {name!r}: it has {', '.join(sorted(observation))}")
        value = observation[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
