"""Env registry: lookup by name and validation of settings.

An env is a `gymnasium.Env` with these conventions:

- Observations and actions are strings (`Text` space); the env parses the policy's raw answer (`offbeat.envs.parsing`).
- `system_prompt: str` describes the task; a tag's `agent_system_template` overrides it.
- All randomness comes from `self.np_random`, seeded by `reset(seed=)`: equal seeds and settings give equal tasks on
  every machine. Envs are reused.
- Numbers and booleans in `step`'s info are metrics: `success` is the last turn's, others (`action_is_valid`,
  `action_is_effective`, `format_penalty`, ...) are means unless `metrics_agg_mode: dict[str, str]` sets `sum`, `mean`,
  `min`, `max`, `first` or `last`.
- Optional `config_class`: pydantic model of `env_config`, the constructor's only argument (if frozen, shared by a
  tag's envs); otherwise `env_config` becomes keyword arguments.
- Optional `info["reward_row"]` of `reset` and `step`: a mapping of plain values that a run's `rewards` get as the row;
  `ground_truth` in it is the right answer.
- Optional setting `split`: `"held_out"` in evaluation; its tasks never occur in training.
- Optional `task_id(seed)`: equal for equal tasks; evaluation runs each once.
- Optional `random_answer(rng)`: plausible answer, for random agents and the contract check.
- Optional `render()`.
- Optional `seats: tuple[str, ...]`, of a game that the policy plays on several seats: `info["seat"]` of `reset` and
  `step` names the seat to move, which the observation is for, and `info["seats"]` of `step` has, by seat, what changed:
  its `reward`, and metrics such as `success`. Each seat is a trajectory of its own.
- Optional `tool_instructions: str`: part of `system_prompt` that a system message of a dataset's row does not replace.
- Optional `functions`: tools in the chat template's format (`offbeat.envs.tools.functions`).
"""

import inspect
import itertools
import json
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, cast

import gymnasium
from pydantic import BaseModel, JsonValue, ValidationError

from offbeat.envs.class_path import load_object
from offbeat.envs.model_path import resolve_location

ENTRY_POINT_GROUP = "offbeat.envs"
REWARD_ROW, GROUND_TRUTH = "reward_row", "ground_truth"
"""In an env's info, and in that."""

BUILT_IN = {
    "frozen_lake": "offbeat.envs.frozen_lake:FrozenLakeEnv",
    "sokoban": "offbeat.envs.sokoban:SokobanEnv",
    "webshop": "offbeat.envs.webshop:WebShopEnv",
    "math": "offbeat.envs.dataset:MathEnv",
    "qa": "offbeat.envs.dataset:QAEnv",
    "code": "offbeat.envs.dataset:CodeEnv",
    "prompt": "offbeat.envs.dataset:PromptEnv",
    "tools": "offbeat.envs.tools:ToolEnv",
    "harbor": "offbeat.envs.harbor:HarborEnv",
    "scienceworld": "offbeat.envs.scienceworld:ScienceWorldEnv",
    "gymnasium": "offbeat.envs.adapters.gymnasium_env:GymnasiumEnv",
    "textarena": "offbeat.envs.adapters.textarena:TextArenaEnv",
    "reasoning_gym": "offbeat.envs.adapters.reasoning_gym:ReasoningGymEnv",
    "gem": "offbeat.envs.adapters.gem:GemEnv",
    "verifiers": "offbeat.envs.adapters.verifiers:VerifiersEnv",
    "openenv": "offbeat.envs.adapters.openenv:OpenEnvEnv",
    "pettingzoo": "offbeat.envs.adapters.pettingzoo:PettingZooEnv",
}

MAX_REPEATS = 2_000
"""Consecutive seeds without a new task that end the search."""
SEARCH_SLICE_S = 0.05

TextEnv = gymnasium.Env[Any, Any]
EnvFactory = Callable[..., object]


def make(env_type: str, env_config: Mapping[str, JsonValue]) -> TextEnv:
    """Build an env; raises ValueError for an unknown one or invalid settings.

    env_type: built-in name, entry point of group `offbeat.envs`, or `module:Class`.
    """
    problems = check_env_config(env_type, env_config)
    if problems:
        raise ValueError("; ".join(problems))
    factory = find_factory(env_type)
    model = _config_class(factory)
    env = factory(**env_config) if model is None else factory(_config(model, json.dumps(env_config)))
    if not isinstance(env, gymnasium.Env):
        raise ValueError(f"{env_type} makes a {type(env).__name__}, not a gymnasium.Env")
    return cast(TextEnv, env)


def _config(model: type[BaseModel], text: str) -> BaseModel:
    return _shared_config(model, text) if model.model_config.get("frozen") else model.model_validate_json(text)


@lru_cache
def _shared_config(model: type[BaseModel], text: str) -> BaseModel:
    return model.model_validate_json(text)


def check_env_config(env_type: str, env_config: Mapping[str, JsonValue]) -> list[str]:
    try:
        factory = find_factory(env_type)
    except ValueError as error:
        return [str(error)]
    model = _config_class(factory)
    if model is not None:
        return _model_problems(env_type, model, env_config)
    return _signature_problems(env_type, factory, env_config)


def find_factory(env_type: str) -> EnvFactory:
    """Raises ValueError for an unknown name or failed import."""
    path = BUILT_IN.get(env_type) or (env_type if ":" in env_type else _entry_point_path(env_type))
    try:
        factory: object = load_object(path)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"env_type {env_type!r}: {error}: add its folder to PYTHONPATH (for a deployed mesh, before `ray start`)"
        ) from error
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"env_type {env_type!r}: {error}") from error
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"env_type {env_type!r}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ValueError(
            f"env_type {env_type!r} is a {type(factory).__name__}, not a class or function that makes an env"
        )
    return factory


def list_names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def describe(env_type: str) -> str:
    """Return the docstring's first line; raises ValueError for an unknown env."""
    own = find_factory(env_type).__doc__  # of gymnasium.Env for a class without one, by `inspect.getdoc`
    return inspect.cleandoc(own or "").partition("\n")[0]


def setting_names(env_type: str) -> list[str]:
    """Raises ValueError for an unknown env."""
    return _setting_names(find_factory(env_type))[0]


def held_out_config(env_type: str, env_config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Add `split: held_out` unless set or unsupported."""
    if "split" in env_config or "split" not in _setting_names(find_factory(env_type))[0]:
        return dict(env_config)
    return {**env_config, "split": "held_out"}


def distinct_seeds(n: int, start: int, env_type: str, env_config: Mapping[str, JsonValue]) -> list[int]:
    """Return `n` seeds from `start` with distinct tasks, repeated if too few."""
    env = make(env_type, env_config)
    try:
        search = SeedSearch(env)
        while (seeds := search.run(n, start)) is None:
            pass
        return seeds
    finally:
        env.close()


class SeedSearch:
    """Search for seeds of an env with distinct tasks, in slices of `SEARCH_SLICE_S`."""

    def __init__(self, env: TextEnv) -> None:
        self._task_id = cast(Callable[[int], object] | None, getattr(env.unwrapped, "task_id", None))
        self._start = self._next = self._repeats = 0
        self._seed_by_task: dict[object, int] = {}

    def run(self, n: int, start: int) -> list[int] | None:
        """Return `n` seeds from `start`, repeated if too few; None: call again."""
        if self._task_id is None:
            return list(range(start, start + n))
        if start != self._start:
            self._start, self._next, self._repeats, self._seed_by_task = start, start, 0, {}
        deadline = time.monotonic() + SEARCH_SLICE_S
        while len(self._seed_by_task) < n and self._repeats < MAX_REPEATS:
            if time.monotonic() > deadline:
                return None
            before = len(self._seed_by_task)
            self._seed_by_task.setdefault(self._task_id(self._next), self._next)
            self._next += 1
            self._repeats = 0 if len(self._seed_by_task) > before else self._repeats + 1
        return list(itertools.islice(itertools.cycle(self._seed_by_task.values()), n))


def entry_point_paths() -> dict[str, str]:
    """Return `module:Class` of installed packages' envs, by name."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def _entry_point_path(name: str) -> str:
    paths = entry_point_paths()
    if name in paths:
        return paths[name]
    raise ValueError(
        f"env_type: no env named {name!r}{_did_you_mean(name, list_names())}; known envs: {', '.join(list_names())}; "
        "or name a class of your own as `module:Class`"
    )


def _config_class(factory: EnvFactory) -> type[BaseModel] | None:
    model: object = getattr(factory, "config_class", None)
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _setting_names(factory: EnvFactory) -> tuple[list[str], bool]:
    """Return the names, and whether others are accepted."""
    model = _config_class(factory)
    if model is not None:
        return list(model.model_fields), model.model_config.get("extra") == "allow"
    parameters = inspect.signature(factory).parameters.values()
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in keywords]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _model_problems(env_type: str, model: type[BaseModel], env_config: Mapping[str, JsonValue]) -> list[str]:
    try:
        model.model_validate_json(json.dumps(env_config))
    except ValidationError as error:
        problems: list[str] = []
        for details in error.errors(include_url=False):
            if details["type"] == "too_short" and details.get("ctx", {})["actual_length"] < len(details["input"]):
                # its invalid items, which have problems of their own, are not counted
                continue
            key = ".".join(str(part) for part in resolve_location(model, details["loc"]).keys)
            if details["type"] == "extra_forbidden":
                table = resolve_location(model, details["loc"][:-1]).table or model
                problems.append(_unknown_setting(env_type, key, list(table.model_fields)))
            else:
                message = details["msg"].removeprefix("Value error, ")
                problems.append(f"env_config{'.' if key else ''}{key}: {message}, got {details['input']!r}")
        return problems
    return []


def _signature_problems(env_type: str, factory: EnvFactory, env_config: Mapping[str, JsonValue]) -> list[str]:
    names, accepts_others = _setting_names(factory)
    problems = [_unknown_setting(env_type, key, names) for key in env_config if key not in names and not accepts_others]
    for parameter in inspect.signature(factory).parameters.values():
        is_required = parameter.name in names and parameter.default is inspect.Parameter.empty
        if is_required and parameter.name not in env_config:
            problems.append(f"env_config.{parameter.name}: required by {env_type}")
    return problems


def _unknown_setting(env_type: str, key: str, names: list[str]) -> str:
    settings = f"it has {', '.join(names)}" if names else "it has no settings"
    parent, dot, leaf = key.rpartition(".")
    hint = _did_you_mean(leaf, names, f"env_config.{parent}{dot}")
    return f"env_config.{key}: {env_type} has no such setting{hint}; {settings}"


def _did_you_mean(name: str, known: list[str], prefix: str = "") -> str:
    close = get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""
