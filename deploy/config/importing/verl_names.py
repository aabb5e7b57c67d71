"""Names of verl 0.9's keys of rewards in verl 0.7, by which the rules are written."""

from offbeat.deploy.config.importing.report import KeyPath
from offbeat.deploy.config.importing.rules import Tree, leaves, put

NAMES: dict[str, str] = {
    "reward.custom_reward_function": "custom_reward_function",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
}
"""By prefix; the first one that fits counts."""


def old_name(path: KeyPath) -> KeyPath:
    for prefix, name in NAMES.items():
        parts = tuple(prefix.split("."))
        if path[: len(parts)] == parts:
            return (*name.split("."), *path[len(parts) :])
    return path


def with_old_names(source: Tree) -> Tree:
    tree = Tree()
    for path, value in leaves(source, ()):
        put(tree, old_name(path), value)
    return tree
