"""Adapter for registered gymnasium envs."""

import re
from collections import Counter
from functools import reduce
from typing import Any, ClassVar, Literal, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from pydantic import Field, JsonValue, field_validator

from offbeat.envs.adapters.text import TextEnv, select_numbers
from offbeat.envs.class_path import load_object
from offbeat.envs.config import Config
from offbeat.envs.parsing import compile_pattern

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
DISTANT_SIGN = re.compile(r"[-+]\s+(?=\.?\d)")
MINUS_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")


class WrapperConfig(Config):
    path: str
    """`module:Class`, such as `gymnasium.wrappers:TimeLimit`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Its arguments besides the env."""


class GymnasiumConfig(Config):
    id: str
    """Id, such as `CartPole-v1` or `module:Env-v0`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of `gymnasium.make`."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers, the first innermost."""
    actions: tuple[str, ...] = ()
    """Names of a discrete space's actions, in order; empty: numbers."""
    action_pattern: str = ""
    """Regular expression whose (last) group is the action; empty: the whole answer."""
    observation: Literal["values", "ansi"] = "values"
    """The observation's values, or the env's `ansi` rendering."""
    digits: int = Field(default=3, ge=0)
    """Decimals of numbers in observations."""
    success_reward: float | None = None
    """Minimum return of a success; None: the env's own `success`, if any."""
    format_penalty: float = Field(default=-0.1, le=0)
    """Reward of an answer without an action; the env is not stepped."""
    system_prompt: str = ""
    """System prompt; empty lists the valid answers."""
    words: tuple[str, ...] = ()
    """Observations' words, for the tiny policy's tokenizer, besides prompt's and actions'."""
    render_mode: str | None = None
    """The env's render mode, such as `rgb_array` for images; as in `kwargs`."""

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        if pattern:
            compile_pattern(pattern)
        return pattern


class GymnasiumEnv(TextEnv):
    """A registered gymnasium env as a text env."""

    config_class: ClassVar[type[GymnasiumConfig]] = GymnasiumConfig

    def __init__(self, config: GymnasiumConfig) -> None:
        """Raises ValueError for an unknown env or wrapper, or actions without a text form."""
        settings: dict[str, Any] = {**config.kwargs}
        if config.render_mode is not None:
            settings["render_mode"] = config.render_mode
        if config.observation == "ansi" and settings.setdefault("render_mode", "ansi") != "ansi":
            raise ValueError(f"observation: ansi needs render_mode: ansi, got {settings['render_mode']}")
        try:
            made: gymnasium.Env[Any, Any] = gymnasium.make(config.id, **settings)
        except Exception as error:  # an env may raise anything
            raise ValueError(f"gymnasium.make({config.id!r}): {type(error).__name__}: {error}") from error
        modes, mode = cast(list[str], made.metadata.get("render_modes") or []), settings.get("render_mode")
        if mode is not None and mode not in modes:
            made.close()
            raise ValueError(f"{config.id} has no render mode {mode!r}; it has {', '.join(modes) or 'none'}")
        self.metadata, self.render_mode = made.metadata, mode
        self._env = reduce(_wrap, config.wrappers, made)
        space = self._env.action_space
        if not isinstance(space, spaces.Discrete | spaces.Box | spaces.Text):
            raise ValueError(f"{config.id} has a {type(space).__name__} action space; supported: Discrete, Box, Text")
        if config.actions and (not isinstance(space, spaces.Discrete) or len(config.actions) != cast(Any, space).n):
            raise ValueError(f"{len(config.actions)} names of actions, but {config.id} has {space}")
        if twins := [name for name, n in Counter(name.lower() for name in config.actions).items() if n > 1]:
            raise ValueError(f"actions: {twins[0]!r} names two actions, apart from upper and lower case: rename one")
        self.config = config
        self._space = cast("spaces.Discrete[Any] | spaces.Box[Any] | spaces.Text", space)
        self._pattern = compile_pattern(config.action_pattern) if config.action_pattern else None
        self._observation: object = None
        self._return = 0.0
        super().__init__(config.system_prompt or self._default_prompt())
        if config.words:
            names = self._action_names() if isinstance(space, spaces.Discrete) else ()
            self.words = tuple(dict.fromkeys((*config.words, *self.system_prompt.split(), *names)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._observation, _ = self._env.reset(seed=seed, options=options)
        self._return = 0.0
        return self._observe(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        parsed_action = self._parse_action(action)
        if parsed_action is None:
            penalty = self.config.format_penalty
            return self._observe(), penalty, False, False, {"action_is_valid": False, "format_penalty": penalty}
        self._observation, reward, terminated, truncated, info = self._env.step(parsed_action)
        self._return += float(reward)
        step_info: dict[str, Any] = {**select_numbers(info), "action_is_valid": True, "format_penalty": 0.0}
        if self.config.success_reward is not None:
            step_info["success"] = self._return >= self.config.success_reward
        return self._observe(), float(reward), bool(terminated), bool(truncated), step_info

    def random_answer(self, rng: np.random.Generator) -> str:
        action = self._random_action(rng)
        forms = (action, f"<answer>{action}</answer>", f"<think></think><answer>{action}</answer>")
        return next((form for form in forms if self._extract(form) == action), action)

    def _random_action(self, rng: np.random.Generator) -> str:
        space = self._space
        if isinstance(space, spaces.Discrete):
            return self._action_names()[int(rng.integers(len(self._action_names())))]
        if isinstance(space, spaces.Text):
            return "a"
        low, high = np.float64(space.low), np.float64(space.high)
        low = np.where(np.isfinite(low), low, np.where(np.isfinite(high), np.minimum(-1, high - 2), -1))
        high = np.where(np.isfinite(high), high, np.maximum(1, low + 2))
        return " ".join(f"{value:.3g}" for value in np.ravel(rng.uniform(low, high)))

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _action_names(self) -> tuple[str, ...]:
        if self.config.actions:
            return self.config.actions
        space = cast("spaces.Discrete[Any]", self._space)
        return tuple(str(int(space.start) + i) for i in range(int(space.n)))

    def _default_prompt(self) -> str:
        if isinstance(self._space, spaces.Discrete):
            return f"Answer with one of {', '.join(self._action_names())}."
        if isinstance(self._space, spaces.Box):
            return f"Answer with {int(np.prod(self._space.shape))} numbers."
        return "Answer with text."

    def _extract(self, answer: str) -> str | None:
        if self._pattern is None:
            return answer.strip()
        match = self._pattern.search(answer)
        return None if match is None else (match[self._pattern.groups] or "").strip()

    def _parse_action(self, answer: str) -> Any:
        space, text = self._space, self._extract(answer)
        if text is None:
            return None
        match space:
            case spaces.Discrete():
                names = [name.lower() for name in self._action_names()]
                return int(space.start) + names.index(text.lower()) if text.lower() in names else None
            case spaces.Text():
                return text if space.contains(text) else None
            case _:
                numbers = _read_numbers(text)
                if len(numbers) != int(np.prod(space.shape)):
                    return None
                values = np.clip(np.reshape(numbers, space.shape), space.low, space.high)
                # clipped first: integer dtypes would wrap around
                return values.astype(space.dtype) if np.isfinite(values).all() else None

    def _observe(self) -> str:
        if self.config.observation == "ansi":
            return str(self._env.render())
        return self._format(self._observation)

    def _format(self, value: object) -> str:
        match value:
            case dict():
                return "\n".join(f"{key}: {self._format(part)}" for key, part in cast(dict[str, object], value).items())
            case tuple():
                return " ".join(self._format(part) for part in cast(tuple[object, ...], value))
            case np.ndarray():
                return " ".join(self._format(part) for part in cast(list[object], value.ravel().tolist()))
            case float() | np.floating():
                return f"{float(value):.{self.config.digits}f}"
            case _:
                return str(value)


def _read_numbers(text: str) -> list[float]:
    """Return a text's numbers; none if a sign may be a number's or a dash, as in `1 - 2`."""
    text = text.translate(MINUS_SIGNS)
    if sign := DISTANT_SIGN.search(text):
        joined = text[: sign.start() + 1] + text[sign.end() :]
        if not NUMBER.fullmatch(joined):
            return []
        text = joined
    return [float(number) for number in NUMBER.findall(text)]


def _wrap(env: gymnasium.Env[Any, Any], wrapper: WrapperConfig) -> gymnasium.Env[Any, Any]:
    try:
        wrapped: object = load_object(wrapper.path)(env, **wrapper.kwargs)
    except Exception as error:  # a wrapper may raise anything
        raise ValueError(f"wrapper {wrapper.path!r}: {type(error).__name__}: {error}") from error
    if not isinstance(wrapped, gymnasium.Env):
        raise ValueError(f"wrapper {wrapper.path!r} makes a {type(wrapped).__name__}, not a gymnasium.Env")
    return cast("gymnasium.Env[Any, Any]", wrapped)
