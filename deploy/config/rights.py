"""Code, programs and folders of a configuration, compared with a caller's rights.

Invariant: every such key is yielded here. Modules are compared before and after import: an allowed module also has what
it imports.
"""

import inspect
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

from offbeat.deploy.config.checks.prompts import OnStep
from offbeat.deploy.config.run import RunConfig
from offbeat.envs.adapters.pettingzoo import RANDOM
from offbeat.envs.class_path import load_object
from offbeat.envs.registry import BUILT_IN, entry_point_paths
from offbeat.services.control.rights import Rights
from offbeat.services.generation.config import VllmConfig
from offbeat.services.reward.kinds.config import CodeSandboxConfig, HttpConfig, NemoGymConfig, UserFunctionConfig
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.user_function import is_function
from offbeat.trainer.trackers.registry import TRACKERS

OWN_PACKAGE = "offbeat"
AGENTS = "offbeat.deploy.agents"
OWN_CODE: Mapping[str, tuple[str, ...]] = {
    "custom_envs.*.env_type": (),
    "custom_envs.*.agent_runner.path": (
        f"{AGENTS}.walker:play", f"{AGENTS}.harbor_trial:play", f"{AGENTS}.verifiers_env:play",
    ),
    "custom_envs.*.env_config.id": (),
    "custom_envs.*.env_config.board": (),
    "custom_envs.*.env_config.opponents.*.path": (
        f"{AGENTS}.opponents:ChatOpponent", f"{AGENTS}.opponents:CheckpointOpponent",
    ),
    "custom_envs.*.env_config.wrappers.*.path": (),
    "custom_envs.*.env_config.agent.import_path": (f"{AGENTS}.harbor_shell:ShellAgent",),
    "custom_envs.*.env_config.agent.name": (f"{AGENTS}.harbor_shell:ShellAgent",),
    "*_env_manager.task_sampler.path": ("offbeat.envs.task_samplers:Levels",),
    "warm_start.demos": (
        "offbeat.envs.dataset.arithmetic:careless_answers", "offbeat.envs.frozen_lake.demos:careful_wandering",
        "offbeat.envs.harbor.demos:careless_solving", "offbeat.envs.sokoban.demos:clumsy_solving",
        "offbeat.envs.webshop.demos:careless_shopping",
    ),
    "group_filter_cls": (),
    "adv_estimator": (),
    "pg_variant": (),
    "reward_shaping.function": (),
    "train_infer_correction.function": (),
    "rewards.*.path": (),
    "track_with.*": (),
}  # fmt: skip
"""Pattern of a key that names code -> what of Offbeat's own may be named there besides short names.

With others, whose arguments come from the configuration, any function of Offbeat's would be callable.
"""
TRIAL_AGENTS = {f"{AGENTS}.harbor_trial": "harbor", f"{AGENTS}.verifiers_env": "verifiers"}
"""Module of an agent that runs code of the first observation -> env whose settings, compared here, make it."""
HARBOR_AGENT_KEYS = {
    "name", "import_path", "model_name", "kwargs", "env", "override_timeout_sec", "override_setup_timeout_sec",
    "max_timeout_sec",
}  # fmt: skip
"""Keys of Harbor's `agent` block that start nothing besides the agent."""
SECRET = "an environment variable of the service, which would be sent to a URL,"
TEXT_ENGINE_KEYS = ("dtype", "kv_cache_dtype")
"""Engine arguments that may be texts; others name classes, plugins, files or hosts."""
CODE_ENGINE_KEYS = ("trust_remote_code",)
"""Switches to run a model folder's code."""


class CodePath(NamedTuple):
    """Module of a key, and `:` with its object, if any."""

    key: str
    path: str

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]


def check_rights(config: RunConfig, rights: Rights, table: str = "") -> Iterator[ConfigIssue]:
    """Yield what `rights` do not cover, without imports.

    table: of the rights, such as `control`; empty: the service's.
    """
    prefix = f"{table}." if table else ""
    if not rights.any_module:
        yield from _check_code(config, rights, f"{prefix}allow_modules")
    if rights.output_roots is not None:
        roots = ", ".join(rights.output_roots) or "none"
        for path, place in written_places(config):
            if not rights.allows_folder(place):
                yield ConfigIssue(
                    path, f"{place} is in none of {prefix}output_roots ({roots}): use one of them, or add it there"
                )


def _check_code(config: RunConfig, rights: Rights, key: str) -> Iterator[ConfigIssue]:
    modules = ", ".join(rights.allow_modules or ()) or "none"
    for code in code_paths(config):
        if not rights.allows_module(code.module):
            yield ConfigIssue(
                code.key,
                f"module {code.module!r} is not in {key} ({modules}): add it there, or use another",
            )
        elif "." in code.path.partition(":")[2]:
            yield ConfigIssue(code.key, f"{code.path!r} must be `module:name` of one object, with {key} set")
    for path, what in programs(config):
        yield ConfigIssue(path, f"{what} is not available with {key} set: leave it out")


def check_definitions(config: RunConfig, rights: Rights, on_step: OnStep) -> Iterator[ConfigIssue]:
    """Import the configuration's modules; yield foreign objects of allowed ones.

    Modules that can't be imported have issues of their own.
    """
    if rights.any_module:
        return
    for code in code_paths(config):
        if ":" not in code.path:
            continue
        on_step(code.key, f"import of {code.path}")
        try:
            imported = load_object(code.path)
        except Exception:
            continue
        module, name = _definition(imported)
        if not rights.allows_module(module):
            yield ConfigIssue(
                code.key, f"{code.path} is defined in {module or 'an unknown module'}, which is not in allow_modules"
            )
        elif module.partition(".")[0] == OWN_PACKAGE:
            yield from _check_own(config, code, f"{module}:{name}")


def _definition(value: object) -> tuple[str, str]:
    """Return the module and the name of an object's definition, or empty texts."""
    origin = inspect.getmodule(value)
    module = getattr(value, "__module__", None) or (origin and origin.__name__) or ""
    return module, getattr(value, "__qualname__", "")


def _check_own(config: RunConfig, code: CodePath, definition: str) -> Iterator[ConfigIssue]:
    if definition not in own_code(code.key):
        known = " or ".join(own_code(code.key)) or "a short name, or code of your own"
        yield ConfigIssue(code.key, f"{code.path} of Offbeat's can't be named here with allow_modules: use {known}")
        return
    module = definition.partition(":")[0]
    if module not in TRIAL_AGENTS:
        return
    env = config.custom_envs[code.key.removeprefix("custom_envs.").removesuffix(".agent_runner.path")]
    made = (env.env_type, env.env_config.get("played_by"), env.agent_template)
    if made != (TRIAL_AGENTS[module], "agent", "{observation}"):
        yield ConfigIssue(
            code.key,
            f"{code.path} runs what an observation names: with allow_modules it needs env_type: {TRIAL_AGENTS[module]}, "
            "played_by: agent, and no agent_template",
        )


def own_code(key: str) -> set[str]:
    """Return what of Offbeat's own a key may name; a key in no pattern: nothing."""
    named = [set(own) for pattern, own in OWN_CODE.items() if fnmatchcase(key, pattern)]
    return set[str].intersection(*named) if named else set()


def code_paths(config: RunConfig) -> Iterator[CodePath]:
    """Yield the configuration's modules, except Offbeat's short names."""
    for tag, env in config.custom_envs.items():
        yield from _env_code(f"custom_envs.{tag}", env.env_type, env.env_config)
        if env.agent_runner and env.agent_runner.path:
            yield CodePath(f"custom_envs.{tag}.agent_runner.path", env.agent_runner.path)
    for name, manager in (("train_env_manager", config.train_env_manager), ("val_env_manager", config.val_env_manager)):
        if manager.task_sampler:
            yield CodePath(f"{name}.task_sampler.path", manager.task_sampler.path)
    if config.warm_start:
        yield CodePath("warm_start.demos", config.warm_start.demos)
    if config.group_filter_cls:
        yield CodePath("group_filter_cls", config.group_filter_cls)
    functions = {
        "adv_estimator": config.adv_estimator,
        "pg_variant": config.pg_variant,
        "reward_shaping.function": config.reward_shaping.function or "",
        "train_infer_correction.function": config.train_infer_correction.function or "",
    }
    yield from (CodePath(key, path) for key, path in functions.items() if is_function(path))
    for place, reward in enumerate(config.rewards):
        if isinstance(reward, UserFunctionConfig):
            yield CodePath(f"rewards.{place}.path", reward.path)
    for place, tracker in enumerate(config.track_with):
        if tracker not in TRACKERS:
            yield CodePath(f"track_with.{place}", tracker)


def _env_code(key: str, env_type: str, env_config: Mapping[str, Any]) -> Iterator[CodePath]:
    if env_type not in BUILT_IN:
        yield CodePath(f"{key}.env_type", entry_point_paths().get(env_type, env_type))
        return
    name = env_config.get("id")
    if env_type == "gymnasium":
        if isinstance(name, str) and ":" in name:
            yield CodePath(f"{key}.env_config.id", name.partition(":")[0])
        yield from _wrapper_code(f"{key}.env_config.wrappers", env_config)
    if env_type == "pettingzoo":
        yield from _game_code(f"{key}.env_config", env_config)
    if env_type == "harbor":
        for key_of_class in ("import_path", "name"):  # Harbor takes `module:Class` in both
            path = _table(env_config, "agent").get(key_of_class)
            if isinstance(path, str) and (key_of_class == "import_path" or ":" in path):
                yield CodePath(f"{key}.env_config.agent.{key_of_class}", path)
    if env_type == "verifiers" and isinstance(name, str):
        yield CodePath(f"{key}.env_config.id", name.rpartition("/")[2].replace("-", "_"))
    wrapped, settings = env_config.get("env_type"), env_config.get("env_config", {})
    if env_type == "tools" and isinstance(wrapped, str) and isinstance(settings, dict):
        yield from _env_code(f"{key}.env_config", wrapped, cast(dict[str, Any], settings))


def _wrapper_code(key: str, env_config: Mapping[str, Any]) -> Iterator[CodePath]:
    wrappers = env_config.get("wrappers")
    for place, each in enumerate(cast(list[Any], wrappers) if isinstance(wrappers, list) else []):
        if isinstance(each, dict) and isinstance(path := cast(dict[str, Any], each).get("path"), str):
            yield CodePath(f"{key}.{place}.path", path)


def _game_code(key: str, env_config: Mapping[str, Any]) -> Iterator[CodePath]:
    for name in ("id", "board"):
        if isinstance(path := env_config.get(name), str) and ":" in path:
            yield CodePath(f"{key}.{name}", path)
    for seat, opponent in _opponents(env_config).items():
        if isinstance(path := opponent.get("path"), str) and path != RANDOM:
            yield CodePath(f"{key}.opponents.{seat}.path", path)


def _opponents(env_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    named = _table(env_config, "opponents")
    return {seat: cast(dict[str, Any], each) for seat, each in named.items() if isinstance(each, dict)}


def _table(env_config: Mapping[str, Any], key: str) -> dict[str, Any]:
    table: object = env_config.get(key)
    return cast(dict[str, Any], table) if isinstance(table, dict) else {}


def programs(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that run programs or foreign plugins, and their values."""
    for tag, env in config.custom_envs.items():
        if env.agent_runner and env.agent_runner.command:
            yield f"custom_envs.{tag}.agent_runner.command", "a program"
        if env.agent_runner and env.agent_runner.python:
            yield f"custom_envs.{tag}.agent_runner.python", "a program"
        yield from _env_programs(f"custom_envs.{tag}.env_config", env.env_type, env.env_config)
    for place, reward in enumerate(config.rewards):
        if isinstance(reward, CodeSandboxConfig) and reward.sandbox.isolation != "require":
            yield f"rewards.{place}.sandbox.isolation", "running programs without isolation"
        if isinstance(reward, HttpConfig | NemoGymConfig | LlmJudgeConfig) and reward.api_key_env is not None:
            yield f"rewards.{place}.api_key_env", SECRET
    if config.redis.server is not None:
        yield "redis.server", "a program"
    for name in config.system_envs:
        yield f"system_envs.{name}", "an environment variable, which can name code,"
    if config.actor_infer.strategy_args.python:
        yield "actor_infer.strategy_args.python", "a program"
    yield from _engine_programs(ENGINE, config.actor_infer.engine)
    for place, reward in enumerate(config.rewards):
        if isinstance(reward, LlmJudgeConfig):
            yield from _engine_programs(
                f"rewards.{place}.strategy_args.strategy_config", reward.strategy_args.strategy_config
            )
    for path, text in _texts(
        "actor_train.strategy_args.strategy_config", config.actor_train.strategy_args.strategy_config
    ):
        if any(sign in text for sign in "./:\\"):
            yield path, "a text that can name code or a file"


def _engine_programs(key: str, engine: VllmConfig) -> Iterator[tuple[str, str]]:
    for name, value in (engine.model_extra or {}).items():
        is_plain = value is None or isinstance(value, bool | int | float)
        is_name = name in TEXT_ENGINE_KEYS and isinstance(value, str) and value.isidentifier()
        # SGLang's command line takes the beginning of an option for it
        is_switch = any(code.startswith(name) for code in CODE_ENGINE_KEYS) and value
        if is_switch or not (is_plain or is_name):
            yield f"{key}.{name}", "this argument of vLLM, which can name code,"


def _env_programs(key: str, env_type: str, env_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if env_type == "verifiers" and env_config.get("environment"):
        yield f"{key}.environment", "a harness"
    if env_type == "pettingzoo":
        for seat, opponent in _opponents(env_config).items():
            args: object = opponent.get("args")
            if isinstance(args, dict) and "api_key_env" in args:
                yield f"{key}.opponents.{seat}.args.api_key_env", SECRET
    if env_type == "harbor":
        yield from _trial_programs(key, env_config)
    if env_type == "code" and _may_lack_isolation(env_config.get("sandbox")):
        yield f"{key}.sandbox.isolation", "running programs without isolation"
    if env_type == "tools":
        tools = env_config.get("tools")
        for place, each in enumerate(cast(list[Any], tools) if isinstance(tools, list) else []):
            tool = cast(dict[str, Any], each) if isinstance(each, dict) else {}
            if tool.get("command"):
                yield f"{key}.tools.{place}.command", "a program"
            if _may_lack_isolation(tool.get("limits")):
                yield f"{key}.tools.{place}.limits.isolation", "running programs without isolation"
        wrapped, settings = env_config.get("env_type"), env_config.get("env_config", {})
        if isinstance(wrapped, str) and isinstance(settings, dict):
            yield from _env_programs(f"{key}.env_config", wrapped, cast(dict[str, Any], settings))


def _trial_programs(key: str, env_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "image" in _table(env_config, "sandbox"):
        yield f"{key}.sandbox.image", "a container's image"
    if "network" in _table(env_config, "sandbox"):
        yield f"{key}.sandbox.network", "a network of containers"
    if env_config.get("environment"):
        yield f"{key}.environment", "an environment of Harbor's, which can name code,"
    agent = _table(env_config, "agent")
    for name in sorted(agent.keys() - HARBOR_AGENT_KEYS):
        yield f"{key}.agent.{name}", "this key of Harbor's, which can name programs,"
    for path, text in _texts(f"{key}.agent", agent):
        if "${" in text:
            yield path, SECRET


def _may_lack_isolation(limits: object) -> bool:
    return isinstance(limits, dict) and cast(dict[str, Any], limits).get("isolation", "require") != "require"


def written_places(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys of places to write to or runs to continue, and the places."""
    yield "output_dir", str(config.output_dir)
    if config.logging_dir is not None:
        yield "logging_dir", str(config.logging_dir)
    if config.render_save_dir is not None:
        yield "render_save_dir", str(config.render_save_dir)
    if config.telemetry.otlp_endpoint is not None:
        yield "telemetry.otlp_endpoint", config.telemetry.otlp_endpoint
    if config.weights.url:
        yield "weights.url", config.weights.url
    if not isinstance(config.resume_from_checkpoint, bool):
        yield "resume_from_checkpoint", str(config.resume_from_checkpoint)
    if config.checkpoint_config is not None:
        yield "checkpoint_config.output_dir", config.checkpoint_config.output_dir
    for tag, env in config.custom_envs.items():
        yield from _env_places(f"custom_envs.{tag}.env_config", env.env_config)
    if config.reads_data and config.dpo.precompute_ref_log_probs and config.data is not None:
        for name in ("dataset_name", "val_dataset_name"):
            if path := getattr(config.data, name):
                yield f"data.{name}", str(path)
    trees = {
        "tracker_kwargs": config.tracker_kwargs,
        "actor_train.strategy_args.strategy_config": config.actor_train.strategy_args.strategy_config,
    }
    for key, tree in trees.items():
        for path, text in _texts(key, tree):
            if _is_place(text):
                yield path, text.removeprefix("sqlite:///")


def _env_places(key: str, env_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if isinstance(folder := env_config.get("trials_dir"), str):
        yield f"{key}.trials_dir", folder
    if wrapped := _table(env_config, "env_config"):
        yield from _env_places(f"{key}.env_config", wrapped)


def _is_place(text: str) -> bool:
    return ("/" in text or text in (".", "..")) and not text.startswith(("http://", "https://"))


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in cast(Mapping[str, object], value).items():
            yield from _texts(f"{key}.{name}", each)
    elif isinstance(value, list):
        for place, each in enumerate(cast(list[object], value)):
            yield from _texts(f"{key}.{place}", each)
