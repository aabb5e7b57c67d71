"""Objects named as `module:attribute`."""

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
"""Paths of 0.1 in stored runs -> successors."""


def load_object(path: str) -> Any:
    """Import an object; raises ValueError if not `module:attribute`, ImportError or AttributeError if missing."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"expected `module:name`, got {path!r}")
    return pkgutil.resolve_name(current_path(path))


def current_path(path: str) -> str:
    """Translate a path of 0.1, unless the user has such a module."""
    return RENAMED_PATHS[path] if path in RENAMED_PATHS and not _is_foreign(path.partition(":")[0]) else path


def _is_foreign(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None and not Path(spec.origin).resolve().is_relative_to(ROOT)
