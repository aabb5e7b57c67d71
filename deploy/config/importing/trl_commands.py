"""TRL's command of a file (`trl COMMAND --config FILE`), which the file itself does not have."""

import re
from typing import NamedTuple

from offbeat.deploy.config.importing.rules import Tree

COMMANDS = {"sft": "sft", "dpo": "dpo", "grpo": "rlvr", "rloo": "rlvr", "kto": "dpo", "reward": "reward_model"}
"""TRL's command -> pipeline."""
PREFERENCES = ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down")
UNPAIRED = ("kto", "apo_zero_unpaired")
"""`loss_type` of `trl kto`."""
OWN_KEYS = {
    "rloo": ("normalize_advantages", "reward_clip_range", "rloo_k"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("label_smoothing", "f_divergence_type", "reference_free", "rpo_alpha", "ld_alpha"),
    "grpo": ("scale_rewards", "importance_sampling_level", "delta"),
}
"""Keys that no other command has."""
SHARED_KEYS = {
    ("grpo", "rloo"): ("num_generations", "reward_funcs", "num_iterations", "epsilon"),
    ("dpo", "kto"): ("precompute_ref_log_probs",),
}
"""Keys of two commands; without another indication, the first is taken."""
COMMAND, NAME = "--command", "--name"
"""Entries of a tree: the command that the user names, and the file's name."""


class Command(NamedTuple):
    name: str
    why: str
    """Clause with the indication; empty if the user named it."""
    alternative: str = ""
    """Command that has the same keys."""


def find_pipeline(tree: Tree) -> str:
    """Return the pipeline of a file's command."""
    return COMMANDS[find_command(tree).name]


def find_command(tree: Tree) -> Command:
    """Return TRL's command: the user's, or by a key that no other has, by the file's name, or by keys of two."""
    if COMMAND in tree:
        return Command(tree[COMMAND], "")
    if (own := _by_own_key(tree)) is not None:
        return own
    named, shared = _by_name(tree), _by_shared_key(tree)
    if named and (shared is None or named in (shared.name, shared.alternative)):
        return Command(named, "by its name")
    return shared or Command("sft", "as neither its keys nor its name indicate another command")


def _by_own_key(tree: Tree) -> Command | None:
    for command, keys in OWN_KEYS.items():
        if key := next((key for key in keys if key in tree), ""):
            return Command(command, f"by its key {key}")
    losses = tree.get("loss_type")
    named = {*(losses if isinstance(losses, list) else [losses])}
    if named & {*UNPAIRED}:
        return Command("kto", "by its key loss_type")
    return Command("dpo", "by its key loss_type") if named & {*PREFERENCES} else None


def _by_shared_key(tree: Tree) -> Command | None:
    for (command, alternative), keys in SHARED_KEYS.items():
        if key := next((key for key in keys if key in tree), ""):
            return Command(command, f"by its key {key}", alternative)
    if "max_completion_length" in tree and "max_length" not in tree:
        return Command("grpo", "by its key max_completion_length", "rloo")
    return Command("dpo", "by its key beta", "kto") if "beta" in tree else None


def _by_name(tree: Tree) -> str:
    """Return the only command among the words of the file's name."""
    words = {*re.split(r"[^a-z0-9]+", str(tree.get(NAME, "")).lower())}
    commands = [command for command in COMMANDS if command in words]
    return commands[0] if len(commands) == 1 else ""
