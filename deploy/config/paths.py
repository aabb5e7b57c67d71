"""Local paths of a configuration's tree."""

import copy
import os.path
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.deploy.config.checks.data import DATA_KEYS
from offbeat.deploy.config.hub import MODEL_KEYS, is_hub_id
from offbeat.deploy.config.hub_datasets import DEFAULT_SPLITS, is_dataset_id
from offbeat.deploy.config.run import RunConfig
from offbeat.envs.registry import BUILT_IN
from offbeat.services.chat.template_override import is_file
from offbeat.trainer.config.aliases import find_keys

TINY = "tiny"
PROGRAM_KEYS = ("custom_envs.*.agent_runner.python", "actor_infer.strategy_args.python")
"""Keys of paths, or of names on the PATH."""
PATH_KEYS = (
    *("output_dir", "logging_dir", "render_save_dir", "checkpoint_config.output_dir", "resume_from_checkpoint"),
    *("chat_template", "weights.url", "redis.server"),
    *DATA_KEYS,
    *MODEL_KEYS,
    *PROGRAM_KEYS,
)
"""Keys of local paths; `*` stands for any name or place."""
ENV_PATH_KEYS = (
    *DEFAULT_SPLITS,
    *("data_dir", "tasks_dir", "val_tasks_dir", "trials_dir"),
    "tools.*.corpus",
)
"""Keys of local paths in `env_config` of built-in envs."""


def resolve_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve a canonical tree's relative paths against `folder`."""
    resolved = {"output_dir": str(RunConfig.model_fields["output_dir"].default), **copy.deepcopy(tree)}
    for table, key in _local_paths(resolved, folder):
        table[key] = str(folder / table[key])
    return resolved


def expand_home(tree: dict[str, Any]) -> None:
    """Replace `~` at the start of a canonical tree's paths in place, as `os.path.expanduser`."""
    for table, key in _local_paths(tree, Path()):
        table[key] = os.path.expanduser(table[key])


def _local_paths(tree: dict[str, Any], folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tables of local paths, each with its key."""
    for pattern in PATH_KEYS:
        for path, table in find_keys(tree, pattern):
            if _is_local_path(pattern, table[path[-1]], folder):
                yield table, path[-1]
    for _, env in find_keys(tree, "custom_envs.*.env_config"):
        yield from _env_paths(env, folder)


def _is_local_path(pattern: str, value: object, folder: Path) -> bool:
    if not isinstance(value, str) or value == TINY or "://" in value:
        return False
    if pattern == "chat_template":
        return is_file(value)
    if pattern in PROGRAM_KEYS:
        return "/" in value
    if pattern in DATA_KEYS:
        return not is_dataset_id(value, folder)
    return not (pattern in MODEL_KEYS and is_hub_id(value, folder))


def _env_paths(env: dict[str, Any], folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the paths of a built-in env, also of one within `tools`; in other envs a name may be anything."""
    settings = env.get("env_config")
    if str(env.get("env_type")) not in BUILT_IN or not isinstance(settings, dict):
        return
    for pattern in ENV_PATH_KEYS:
        for path, table in find_keys(settings, pattern):
            name = table[path[-1]]
            if isinstance(name, str) and not (pattern in DEFAULT_SPLITS and is_dataset_id(name, folder)):
                yield table, path[-1]
    yield from _env_paths(settings, folder)
