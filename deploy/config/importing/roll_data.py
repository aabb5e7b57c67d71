"""ROLL's keys of supervised fine-tuning and preference optimization."""

from collections.abc import Iterator
from math import ceil
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_batches import SIZE, num_devices, num_shards
from offbeat.deploy.config.importing.roll_roles import template_outcome, warmup_without_effect
from offbeat.deploy.config.importing.roll_run import STEPS_DEFAULT
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Tree,
    become,
    get,
    get_table,
    missing,
    no_effect,
    rename,
    same,
    take_file,
)


def _length(key: Key) -> Outcome:
    """Take the sum of prompt and response, which is ROLL's sequence_length if that is not set."""
    lengths = [get(key.tree, name) or 0 for name in ("prompt_length", "response_length")]
    if get(key.tree, "sequence_length") or not all(isinstance(each, int) for each in lengths):
        return Outcome("no effect", note="sequence_length counts")
    return Outcome("value", ("sequence_length",), sum(lengths), "prompt_length + response_length")


DATA: tuple[tuple[str, Rule], ...] = (
    ("actor_train.data_args.file_name", take_file("data.dataset_name")),
    ("validation.data_args.file_name", take_file("data.val_dataset_name")),
    ("validation.data_args.template", no_effect("ROLL renders validation rows by the training rows' template")),
    ("*.data_args.template", lambda key: same("global_template")(key) if get(key.tree, "global_template") else None),
    ("actor_train.data_args.template", template_outcome),
    ("*.data_args.dataset_dir", no_effect("ROLL never reads it")),
    ("*.data_args.preprocessing_num_workers", missing("rollout.num_workers render rows while the learner trains")),
    ("*.data_args.**", missing("rows are read from columns alone (docs/pipelines.md)")),
    ("validation.**", missing("evaluation is that of training, on data.val_dataset_name")),
    ("global_template", template_outcome),
    ("val_batch_size|rollout_batch_size", no_effect("of other pipelines")),
    ("prompt_length|response_length", _length),
    ("val_prompt_length|val_sequence_length", no_effect("of other pipelines")),
    ("is_offload_states|is_offload_optimizer_states_in_train_step", missing(
        "weights and optimizer stay on the learner's devices; deepspeed_train can offload them (strategy_config)"
    )),
)  # fmt: skip


def _batch(tree: Tree, per_row: int) -> int | None:
    devices = num_devices(tree)
    args = get_table(tree, "actor_train.training_args")
    if devices is None:
        return None
    rows = (args.get("per_device_train_batch_size") or SIZE) * (args.get("gradient_accumulation_steps") or 1)
    return per_row * rows * max(1, devices // num_shards(tree))


def batch_rules(per_row: int) -> tuple[tuple[str, Rule], ...]:
    """Return rules for the trajectories of a step, from ROLL's batch sizes and devices."""

    def rule(key: Key) -> Outcome:
        value = _batch(key.tree, per_row)
        if value is None:
            return Outcome("no counterpart", note="set rollout_batch_size, trajectories per step")
        what = "pairs count twice; " if per_row == 2 else ""
        return Outcome("value", ("rollout_batch_size",), value, f"{what}per_device_train_batch_size x steps x replicas")

    return (
        ("actor_train.training_args.per_device_train_batch_size", rule),
        ("actor_train.training_args.gradient_accumulation_steps", same("in rollout_batch_size")),
        ("actor_train.training_args.warmup_steps", lambda key: warmup_without_effect(key) if key.value else None),
        ("actor_train.training_args.warmup_steps", lambda key: Outcome("same", key.path, key.value)),
    )


def batch_default(tree: Tree, per_row: int) -> tuple[str, str, Any]:
    """Return the batch of a file without `per_device_train_batch_size`."""
    return "actor_train.training_args.per_device_train_batch_size", "rollout_batch_size", _batch(tree, per_row)


def _share_of_epochs(key: Key) -> Outcome | None:
    """Report a share of steps, whose number follows from the rows."""
    if not key.value or get(key.tree, (*key.path[:-1], "warmup_steps")):
        return None
    return Outcome("no counterpart", note=f"a share of the steps: set {'.'.join(key.path[:-1])}.warmup_steps")


EPOCHS: tuple[tuple[str, Rule], ...] = (
    ("actor_train.training_args.num_train_epochs", rename("data.num_train_epochs")),
    ("max_steps", no_effect("num_train_epochs counts")),
    ("actor_train.training_args.warmup_ratio", _share_of_epochs),
)


def _replicas(tree: Tree) -> int:
    return max(1, (num_devices(tree) or 1) // num_shards(tree))


def _schedule(key: Key) -> Outcome | None:
    """Report that ROLL's schedule of preferences counts `max_steps` once for all replicas together."""
    replicas = _replicas(key.tree)
    if str(key.value).startswith("constant") or replicas == 1:
        return None
    note = f"over max_steps; ROLL's has ended after a {replicas}th of them, its number of replicas"
    return Outcome("same", key.path, key.value, note)


def _share_of_schedule(key: Key) -> Outcome | None:
    steps, ratio = get(key.tree, "max_steps") or STEPS_DEFAULT[2], key.value
    if not ratio or get(key.tree, (*key.path[:-1], "warmup_steps")) or not isinstance(ratio, int | float):
        return None
    value = ceil(steps // _replicas(key.tree) * ratio)
    return Outcome("value", (*key.path[:-1], "warmup_steps"), value, "of max_steps per replica, as in ROLL")


def _pairs(key: Key) -> Outcome:
    return Outcome("value", key.path, 2 * key.value, "responses; ROLL counts pairs")


DPO: tuple[tuple[str, Rule], ...] = (
    *batch_rules(2),
    *DATA,
    ("actor_train|reference.infer_batch_size", lambda key: _pairs(key) if isinstance(key.value, int) else None),
    ("actor_train.training_args.lr_scheduler_type", _schedule),
    ("actor_train.training_args.warmup_ratio", _share_of_schedule),
    ("actor_train.training_args.num_train_epochs", missing(
        "ROLL ends after these epochs if they are fewer than max_steps: then set data.num_train_epochs in its place"
    )),
    ("ipo", become("dpo.loss_type", lambda value: "ipo" if value else "sigmoid", "which ROLL never passes on to its loss")),
    ("beta", rename("dpo.beta", "which ROLL never passes on to its loss: 0.1 there")),
    ("label_smoothing", rename("dpo.label_smoothing", "which ROLL never passes on to its loss: 0 there")),
    ("chosen_key|rejected_key", lambda key: Outcome("renamed", ("data", key.path[0]), key.value)),
)  # fmt: skip


def _column(key: Key) -> Outcome:
    return Outcome("renamed", ("data", key.path[0]), key.value) if key.value else Outcome("same", note="no such column")


SFT: tuple[tuple[str, Rule], ...] = (
    *batch_rules(1),
    ("is_offload_states|is_offload_optimizer_states_in_train_step", no_effect("ROLL's sft pipeline offloads nothing")),
    *DATA,
    *EPOCHS,
    ("system_key|prompt_key|query_key|response_key", _column),
)


def sft_defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    yield "prompt_key", "data.prompt_key", "instruction"
    yield "response_key", "data.response_key", "output"
    yield "", "data.shuffle", False
    yield batch_default(tree, 1)
    yield "actor_train.training_args.num_train_epochs", "data.num_train_epochs", 1
    yield "", "pipeline", "sft"


def dpo_defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    yield "", "data.prompt_key", "instruction"
    yield "", "pipeline", "dpo"
    yield batch_default(tree, 2)
    yield STEPS_DEFAULT
