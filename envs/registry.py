"""Finding and making envs by name, and checking their settings before anything starts.

An env of Offbeat is a `gymnasium.Env` with these habits:

- The observation is a string (`Text` space), the action is the policy's answer as it wrote it (`Text` space); the env
  itself reads the action out of it (`offbeat.envs.parsing`).
- `system_prompt: str` says what the task is. A tag's `agent_system_template` replaces it.
- `reset(seed=)` is the only source of randomness: use `self.np_random`, no global generator. The same seed and settings
  give the same task on every machine. An env is reset and played again many times.
- Numbers and booleans in `step`'s info are metrics. `success` counts as it was after the last turn; others are
  averaged over turns (`action_is_valid`, `action_is_effective`, `format_penalty`, ...) unless the attribute
  `metrics_agg_mode: dict[str, str]` says `sum`, `mean`, `min`, `max`, `first` or `last`.
- Optional: `config_class`, a pydantic model that `env_config` is validated by, whose instance is then the constructor's
  only argument (if the model is frozen, one instance for all envs of a tag); without it `env_config` are keyword arguments.
  Optional: a setting `split` that takes `"held_out"`, which evaluation sets, so that it never meets a training task.
  Optional: `task_id(seed)`, equal for seeds of equal tasks, so that evaluation plays each task once. Optional:
  `random_answer(rng)`, an answer that the env may understand, for a random agent and the contract's checks. Optional:
  `render()`. Optional: `functions`, which the policy may call in its chat template's own form (`envs.tools.functions`).
"""

import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, cast

import gymnasium
from pydantic import BaseModel, JsonValue, ValidationError

from offbeat.envs.class_path import load_object

ENTRY_POINT_GROUP = "offbeat.envs"

BUILT_IN = {
    "frozen_lake": "offbeat.envs.frozen_lake:FrozenLakeEnv",
    "sokoban": "offbeat.envs.sokoban:SokobanEnv",
    "webshop": "offbeat.envs.webshop:WebShopEnv",
    "math": "offbeat.envs.dataset:MathEnv",
    "qa": "offbeat.envs.dataset:QAEnv",
    "code": "offbeat.envs.dataset:CodeEnv",
    "tools": "offbeat.envs.tools:ToolEnv",
    "gymnasium": "offbeat.envs.adapters.gymnasium_env:GymnasiumEnv",
    "textarena": "offbeat.envs.adapters.textarena:TextArenaEnv",
    "reasoning_gym": "offbeat.envs.adapters.reasoning_gym:ReasoningGymEnv",
    "gem": "offbeat.envs.adapters.gem:GemEnv",
    "verifiers": "offbeat.envs.adapters.verifiers:VerifiersEnv",
    "openenv": "offbeat.envs.adapters.openenv:OpenEnvEnv",
}

MAX_REPEATS = 2_000
"""Seeds in a row that bring no new task, after which there is none."""

TextEnv = gymnasium.Env[Any, Any]
EnvFactory = Callable[..., object]


def make(env_type: str, env_config: Mapping[str, JsonValue]) -> TextEnv:
    """Build an env.

    env_type: a built-in name, an entry point of group `offbeat.envs`, or `module:Class`.

    Raises:
        ValueError: there is no such env, or its settings are wrong.
    """
    problems = check_env_config(env_type, env_config)
    if problems:
        raise ValueError("; ".join(problems))
    factory = find(env_type)
    model = _config_class(factory)
    env = factory(**env_config) if model is None else factory(_config(model, json.dumps(env_config)))
    if not isinstance(env, gymnasium.Env):
        raise ValueError(f"{env_type} makes a {type(env).__name__}, not a gymnasium.Env")
    return cast(TextEnv, env)


def _config(model: type[BaseModel], text: str) -> BaseModel:
    """Build the settings object, shared by all envs of a tag."""
    return _shared_config(model, text) if model.model_config.get("frozen") else model.model_validate_json(text)


@lru_cache
def _shared_config(model: type[BaseModel], text: str) -> BaseModel:
    return model.model_validate_json(text)


def check_env_config(env_type: str, env_config: Mapping[str, JsonValue]) -> list[str]:
    """Return every problem of a tag's `env_type` and `env_config`, each with what would be right."""
    try:
        factory = find(env_type)
    except ValueError as error:
        return [str(error)]
    model = _config_class(factory)
    if model is not None:
        return _model_problems(env_type, model, env_config)
    return _signature_problems(env_type, factory, env_config)


def find(env_type: str) -> EnvFactory:
    """Return the env's class, or what else makes it.

    Raises:
        ValueError: there is none of that name, naming the nearest one.
    """
    path = BUILT_IN.get(env_type) or (env_type if ":" in env_type else _entry_point(env_type))
    try:
        found: object = load_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"env_type {env_type!r}: {error}") from error
    except Exception as error:  # the module may be the user's own: a mistake in it is told
        raise ValueError(f"env_type {env_type!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(
            f"env_type {env_type!r} is a {type(found).__name__}, not a class or function that makes an env"
        )
    return found


def names() -> list[str]:
    """Return every name that `find` knows besides `module:Class`."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def about(env_type: str) -> str:
    """Return the first line of an env's docstring. Raises ValueError if there is no such env."""
    return (inspect.getdoc(find(env_type)) or "").partition("\n")[0]


def settings_of(env_type: str) -> list[str]:
    """Return the names of an env's settings. Raises ValueError if there is no such env."""
    return _settings(find(env_type))[0]


def held_out_config(env_type: str, env_config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the settings for evaluation: `split: held_out`, where the env has that setting and the tag does not set it."""
    if "split" in env_config or "split" not in _settings(find(env_type))[0]:
        return dict(env_config)
    return {**env_config, "split": "held_out"}


def distinct_seeds(n: int, start: int, env_type: str, env_config: Mapping[str, JsonValue]) -> list[int]:
    """Return the first `n` seeds from `start` with distinct tasks; an env without `task_id` is assumed to repeat none.

    If the env has fewer tasks than `n`, the seeds repeat in the same order.
    """
    env = make(env_type, env_config)
    try:
        task_id = cast(Callable[[int], object] | None, getattr(env.unwrapped, "task_id", None))
        if task_id is None:
            return list(range(start, start + n))
        chosen: dict[object, int] = {}
        repeats = 0
        for seed in itertools.count(start):
            if len(chosen) >= n or repeats >= MAX_REPEATS:
                break
            before = len(chosen)
            chosen.setdefault(task_id(seed), seed)
            repeats = 0 if len(chosen) > before else repeats + 1
    finally:
        env.close()
    return list(itertools.islice(itertools.cycle(chosen.values()), n))


def _entry_point(name: str) -> str:
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in found:
        return found[name]
    raise ValueError(
        f"env_type: no env named {name!r}{_did_you_mean(name, names())}; there is {', '.join(names())}, or name your own as "
        "`module:Class`"
    )


def _config_class(factory: EnvFactory) -> type[BaseModel] | None:
    found: object = getattr(factory, "config_class", None)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _settings(factory: EnvFactory) -> tuple[list[str], bool]:
    """Return names of an env's settings, and whether it takes others too."""
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
            key = ".".join(str(part) for part in details["loc"])
            if details["type"] == "extra_forbidden":
                problems.append(_unknown(env_type, key, list(model.model_fields)))
            else:
                message = details["msg"].removeprefix("Value error, ")
                problems.append(f"env_config{'.' if key else ''}{key}: {message}, got {details['input']!r}")
        return problems
    return []


def _signature_problems(env_type: str, factory: EnvFactory, env_config: Mapping[str, JsonValue]) -> list[str]:
    names, takes_others = _settings(factory)
    problems = [_unknown(env_type, key, names) for key in env_config if key not in names and not takes_others]
    for parameter in inspect.signature(factory).parameters.values():
        wanted = parameter.name in names and parameter.default is inspect.Parameter.empty
        if wanted and parameter.name not in env_config:
            problems.append(f"env_config.{parameter.name}: {env_type} needs it")
    return problems


def _unknown(env_type: str, key: str, names: list[str]) -> str:
    settings = f"it has {', '.join(names)}" if names else "it has no settings"
    return f"env_config.{key}: {env_type} has no such setting{_did_you_mean(key, names, 'env_config.')}; {settings}"


def _did_you_mean(name: str, known: list[str], prefix: str = "") -> str:
    close = get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""
