"""Batch sizes and counts of steps of TRL's files."""

import math
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Rule, Tree, get
from offbeat.deploy.config.importing.trl_commands import find_pipeline

ARGS = "actor_train.training_args"
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
          "num_iterations", "num_processes")  # fmt: skip
PAIRED = ("dpo", "reward_model")
"""Pipelines with two trajectories a row; KTO's second has another row's response."""
BATCH, STEPS = 8, 1
"""TRL's defaults of batch size and accumulation."""


def count(tree: Tree, name: str, default: int) -> int:
    value = get(tree, name)
    return value if value and isinstance(value, int) else default


def are_counts(tree: Tree) -> bool:
    return all(isinstance(get(tree, name) or 1, int) for name in COUNTS)


def rollout_batch(tree: Tree) -> int:
    """Return a batch's trajectories: TRL counts completions, or rows; a pair has two responses."""
    size = optimizer_batch(tree)
    match find_pipeline(tree):
        case pipeline if pipeline in PAIRED:
            return 2 * size
        case "rlvr":
            per_step = count(tree, "per_device_train_batch_size", BATCH) * count(tree, "num_processes", 1)
            return count(tree, "generation_batch_size", per_step * count(tree, "steps_per_generation", 0) or size)
        case _:
            return size


def optimizer_batch(tree: Tree) -> int:
    rows = count(tree, "per_device_train_batch_size", BATCH) * count(tree, "gradient_accumulation_steps", STEPS)
    return rows * count(tree, "num_processes", 1)


def optimizer_steps(tree: Tree) -> int:
    """Return the optimizer steps that use a batch, which is one step here; TRL's steps are of the optimizer."""
    if find_pipeline(tree) != "rlvr":
        return 1
    minibatches, rest = divmod(rollout_batch(tree), optimizer_batch(tree))
    return (1 if rest else minibatches) * count(tree, "num_iterations", 1)


def take_batch(key: Key) -> Outcome | None:
    if not are_counts(key.tree):
        return None
    processes = count(key.tree, "num_processes", 1)
    note = f"with gradient_accumulation_steps, of {'one process' if processes == 1 else f'{processes} processes'}"
    if find_pipeline(key.tree) in PAIRED:
        note += "; two responses a row"
    if get(key.tree, "packing") and find_pipeline(key.tree) == "sft":
        note += "; packed sequences there, rows here"
    return Outcome("value", ("rollout_batch_size",), rollout_batch(key.tree), note)


def take_generation(key: Key) -> Outcome | None:
    """Convert a generation's size to optimizer steps."""
    if not key.value or not are_counts(key.tree):
        return None
    steps, rest = divmod(rollout_batch(key.tree), optimizer_batch(key.tree))
    if rest:
        return Outcome("no counterpart", note=f"set rollout_batch_size to a multiple of {optimizer_batch(key.tree)}")
    return Outcome("value", (*ARGS.split("."), "num_minibatches"), steps, "optimizer steps per batch")


def to_batches(steps: int, tree: Tree) -> int:
    """Convert optimizer steps to batches."""
    return math.ceil(steps / optimizer_steps(tree))


def in_batches(*target: str) -> Rule:
    """Take a number of optimizer steps as one of batches."""

    def rule(key: Key) -> Outcome | None:
        per_batch = optimizer_steps(key.tree)
        if per_batch == 1 or not isinstance(key.value, int) or key.value <= 0:
            return None
        note = f"batches, of {per_batch} optimizer steps each"
        return Outcome("value", (*target, key.path[0]), to_batches(key.value, key.tree), note)

    return rule


def take_warmup(key: Key) -> Outcome | None:
    """Convert a share of the steps: `warmup_ratio`, or `warmup_steps` below 1."""
    is_ratio = key.path[0] == "warmup_ratio"
    if is_ratio and get(key.tree, "warmup_steps"):
        return Outcome("no effect", note="warmup_steps counts")
    if key.value == 0:
        return Outcome("same", note="no warm-up")
    if not isinstance(key.value, float | int) or not (is_ratio or key.value < 1):
        return None
    steps: Any = get(key.tree, "max_steps")
    if not isinstance(steps, int) or steps <= 0:
        return Outcome("no counterpart", note=f"a share of the steps: set {ARGS}.warmup_steps")
    value = to_batches(math.ceil(steps * key.value), key.tree)
    return Outcome("value", (*ARGS.split("."), "warmup_steps"), value, f"of {steps} optimizer steps")
