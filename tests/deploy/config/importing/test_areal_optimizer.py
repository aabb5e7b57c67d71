"""Schedules of AReaL count an epoch's steps; a critic has the policy's optimizer, besides its learning rate and warm-up."""

from pathlib import Path

import pytest

from offbeat.deploy.config.importing.areal import import_areal
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.rules import get

ARGS = "actor_train.training_args"
ONLINE = "train_dataset: {batch_size: 8, type: rl}\ntotal_train_steps: 100\n"
"""An experiment without a dataset, whose schedules count `total_train_steps`."""
ROWS = "train_dataset: {path: a.jsonl, batch_size: 8, type: rl}\ntotal_train_steps: 100\n"


def convert(folder: Path, optimizer: str, others: str, backend: str = "fsdp:d1") -> Imported:
    path = folder / "config.yaml"
    path.write_text(f"actor: {{path: org/model, backend: '{backend}', optimizer: {{{optimizer}}}}}\n{others}")
    return import_areal(path)


def outcomes(imported: Imported) -> dict[str, tuple[str, str]]:
    return {".".join(each.key): (each.outcome.status, each.outcome.note) for each in imported.keys if each.key}


def test_a_warm_up_is_a_share_of_the_steps_that_its_schedule_counts(tmp_path: Path):
    online = convert(tmp_path, "warmup_steps_proportion: 0.1", ONLINE)
    assert get(online.tree, f"{ARGS}.warmup_steps") == 10
    assert get(online.tree, f"{ARGS}.lr_scheduler_type") == "constant_with_warmup"
    rows = convert(tmp_path, "warmup_steps_proportion: 0.1, lr_scheduler_type: constant", ROWS)
    assert get(rows.tree, f"{ARGS}.warmup_steps") is None
    assert get(rows.tree, f"{ARGS}.lr_scheduler_type") == "constant"
    status, note = outcomes(rows)["actor.optimizer.warmup_steps_proportion"]
    assert (status, "warmup_steps" in note) == ("no counterpart", True)


@pytest.mark.parametrize(("schedule", "is_noted"), [("cosine", True), ("linear", True), ("constant", False)])
def test_a_decay_over_epochs_is_noted(schedule: str, is_noted: bool, tmp_path: Path):
    """total_train_steps only ends a run that has epochs of rows."""
    key = "actor.optimizer.lr_scheduler_type"
    note = outcomes(convert(tmp_path, f"lr_scheduler_type: {schedule}", ROWS))[key][1]
    assert ("over the epochs" in note) == is_noted
    assert "epochs" not in outcomes(convert(tmp_path, f"lr_scheduler_type: {schedule}", ONLINE))[key][1]


@pytest.mark.parametrize(
    ("backend", "status"), [("megatron:d1", "no counterpart"), ("fsdp:d1", "no effect"), ("archon:d1", "no effect")]
)
def test_megatrons_linear_schedule_ends_at_the_lowest_rate(backend: str, status: str, tmp_path: Path):
    imported = convert(tmp_path, "lr_scheduler_type: linear, min_lr_ratio: 0.1", ROWS, backend)
    assert outcomes(imported)["actor.optimizer.min_lr_ratio"][0] == status


def test_a_critics_other_values_are_reported(tmp_path: Path):
    critic = (
        "critic: {path: org/model, ppo_n_minibatches: 4, dtype: bfloat16, eps_clip: 0.5, "
        "optimizer: {lr: 1.0e-5, weight_decay: 0.1, beta2: 0.999, gradient_clipping: 0.5}}\n"
    )
    found = outcomes(convert(tmp_path, "weight_decay: 0.1, gradient_clipping: 2.0", ROWS + critic))
    assert found["critic.optimizer.weight_decay"][0] == "same"  # the actor's
    assert found["critic.optimizer.beta2"][0] == "same"  # AReaL's default
    assert found["critic.ppo_n_minibatches"][0] == "same"
    assert found["critic.optimizer.gradient_clipping"] == ("no counterpart", "the policy's counts: 2.0")
    assert outcomes(convert(tmp_path, "", ROWS + critic))["critic.optimizer.weight_decay"][0] == "no counterpart"


def test_a_critic_has_areals_learning_rate_and_warm_up(tmp_path: Path):
    critic = "critic: {path: org/model, optimizer: {warmup_steps_proportion: 0.2}}\n"
    tree = convert(tmp_path, "lr: 1.0e-6", ONLINE + critic).tree
    assert tree["critic"]["training_args"] == {"learning_rate": 1e-3, "warmup_steps": 20}
    rows = convert(tmp_path, "lr: 1.0e-6", ROWS + critic)
    assert rows.tree["critic"]["training_args"] == {"learning_rate": 1e-3}
    assert outcomes(rows)["critic.optimizer.warmup_steps_proportion"][0] == "no counterpart"
