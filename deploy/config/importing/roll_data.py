"""ROLL's keys of supervised fine-tuning and preference optimization."""

from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_batches import num_devices, num_shards
from offbeat.deploy.config.importing.roll_roles import template_outcome
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

DATA: tuple[tuple[str, Rule], ...] = (
    ("actor_train.data_args.file_name", take_file("data.dataset_name")),
    ("validation.data_args.file_name", take_file("data.val_dataset_name")),
    ("validation.data_args.template", same("as actor_train")),
    ("*.data_args.template", lambda key: same("global_template")(key) if get(key.tree, "global_template") else None),
    ("actor_train.data_args.template", template_outcome),
    ("*.data_args.dataset_dir", no_effect("ROLL never reads it")),
    ("*.data_args.preprocessing_num_workers", missing("rollout.num_workers render rows while the learner trains")),
    ("*.data_args.**", missing("rows are read from columns alone (docs/pipelines.md)")),
    ("validation.**", missing("evaluation is that of training, on data.val_dataset_name")),
    ("global_template", template_outcome),
    ("val_batch_size|rollout_batch_size|prompt_length|response_length", no_effect("of other pipelines")),
)  # fmt: skip


def _batch(tree: Tree, per_row: int) -> int | None:
    devices = num_devices(tree)
    args = get_table(tree, "actor_train.training_args")
    if devices is None:
        return None
    rows = (args.get("per_device_train_batch_size") or 8) * (args.get("gradient_accumulation_steps") or 1)
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
    )


EPOCHS: tuple[tuple[str, Rule], ...] = (
    ("actor_train.training_args.num_train_epochs", rename("data.num_train_epochs")),
    ("max_steps", no_effect("num_train_epochs counts")),
)
DPO: tuple[tuple[str, Rule], ...] = (
    *batch_rules(2),
    *DATA,
    ("actor_train.training_args.num_train_epochs", missing(
        "ROLL ends after these epochs if they are fewer than max_steps: then set data.num_train_epochs in its place"
    )),
    ("ipo", become("dpo.loss_type", lambda value: "ipo" if value else "sigmoid", "which ROLL never passes on to its loss")),
    ("beta", rename("dpo.beta", "which ROLL never passes on to its loss: 0.1 there")),
    ("label_smoothing", rename("dpo.label_smoothing", "which ROLL never passes on to its loss: 0 there")),
    ("chosen_key|rejected_key", lambda key: Outcome("renamed", ("data", key.path[0]), key.value)),
)  # fmt: skip


def _column(key: Key) -> Outcome | None:
    if key.path[0] in ("prompt_key", "response_key"):
        return Outcome("renamed", ("data", key.path[0]), key.value)
    if not key.value:
        return Outcome("same", note="no such column")
    what = "append it to the prompt" if key.path[0] == "query_key" else "put it into `messages` as the system message"
    return Outcome("no counterpart", note=f"column {key.value!r}: {what} in the file")


SFT: tuple[tuple[str, Rule], ...] = (
    *batch_rules(1),
    *DATA,
    *EPOCHS,
    ("system_key|prompt_key|query_key|response_key", _column),
)


def sft_defaults(_tree: Tree) -> Iterator[tuple[str, str, Any]]:
    yield "prompt_key", "data.prompt_key", "instruction"
    yield "response_key", "data.response_key", "output"
    yield "", "data.train_on", "all"
    yield "", "data.shuffle", False
    yield "actor_train.training_args.num_train_epochs", "data.num_train_epochs", 1
    yield "", "pipeline", "sft"


def dpo_defaults(_tree: Tree) -> Iterator[tuple[str, str, Any]]:
    yield "", "data.prompt_key", "instruction"
    yield "", "pipeline", "dpo"
    yield STEPS_DEFAULT
