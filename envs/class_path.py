"""Objects that a configuration names as `module:attribute`."""

import pkgutil
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

RENAMED_PATHS = MappingProxyType(
    {
        "envs.curricula:Levels": "offbeat.envs.task_samplers:Levels",
        "envs.frozen_lake.demos:careful_wandering": "offbeat.envs.frozen_lake.demos:careful_wandering",
        "envs.sokoban.demos:clumsy_solving": "offbeat.envs.sokoban.demos:clumsy_solving",
        "envs.webshop.demos:careless_shopping": "offbeat.envs.webshop.demos:careless_shopping",
        "deploy.agents.verifiers_env:play": "offbeat.deploy.agents.verifiers_env:play",
        "deploy.agents.walker:play": "offbeat.deploy.agents.walker:play",
    }
)
"""Paths of 0.1, found in stored runs and older YAML files, and their paths since 0.2."""


def load_object(path: str) -> Any:
    """Import the object that `path` names.

    Raises:
        ValueError: `path` is not of the form `module:attribute`.
        ImportError: the module can't be imported.
        AttributeError: the module has no such attribute.
    """
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"expected `module:name`, got {path!r}")
    return pkgutil.resolve_name(current_path(path))


def current_path(path: str) -> str:
    """Return the path since 0.2 of a path of 0.1, unless the user has a module of that name; any other path unchanged."""
    return RENAMED_PATHS[path] if path in RENAMED_PATHS and not _is_foreign(path.partition(":")[0]) else path


def _is_foreign(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None and not Path(spec.origin).resolve().is_relative_to(ROOT)
