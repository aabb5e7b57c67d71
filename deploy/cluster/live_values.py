"""Values of live settings in a run's recorded configuration."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.services.live_settings import LIVE_SETTINGS

ENGINE, MANAGER = "actor_infer.generating_args", "train_env_manager.generating_args"
"""Tables with the sampling of training, which agree."""


def set_values(tree: dict[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """Return a copy with other values of live settings."""
    changed = copy.deepcopy(tree)
    for path, value in _by_path(tree, values):
        *parents, leaf = path.split(".")
        table = changed
        for parent in parents:
            table = table[parent]
        table[leaf] = value
    return changed


def to_overrides(tree: Mapping[str, Any], values: Mapping[str, float]) -> list[str]:
    return [f"{path}={value}" for path, value in _by_path(tree, values)]


def _by_path(tree: Mapping[str, Any], values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the key of each value, and that of the training manager if it has one, too."""
    of_manager = tree.get("train_env_manager", {}).get("generating_args", {})
    for name, value in values.items():
        table, _, leaf = (path := LIVE_SETTINGS[name].info.path).rpartition(".")
        yield path, value
        if table == ENGINE and of_manager.get(leaf) is not None:
            yield f"{MANAGER}.{leaf}", value
