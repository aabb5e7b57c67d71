"""ROLL's files of supervised fine-tuning, preferences and distillation become ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.deploy.config.importing.fitting import check_imported
from offbeat.deploy.config.importing.roll import import_roll, translate_roll
from offbeat.deploy.config.importing.trial import make_trial
from offbeat.deploy.config.loader import load_run, validate_tree
from tests.deploy.config.importing.roll_files import DISTILL, DPO, RLVR, SFT, by_key, write_changed

PAIR = {"instruction": "walk", "chosen": "right", "rejected": "left"}
QUESTION = {"question_zh": "walk", "answer_zh": "right"}
ANSWER = {"instruction": "walk", "input": "", "output": "right"}


@pytest.mark.parametrize(
    ("file", "row"), [(DPO, PAIR), (SFT, ANSWER), (DISTILL, QUESTION)], ids=["dpo", "sft", "distill"]
)
def test_a_file_validates_with_model_devices_and_data_replaced(file: Path, row: dict[str, str], tmp_path: Path):
    imported = import_roll(file)
    assert imported.to_do == ()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for _ in range(4)))
    tree = make_trial(imported.tree)
    assert [issue.path for issue in check_imported(tree)] == ["data.dataset_name"]
    tree["data"] |= {"dataset_name": str(data), "val_dataset_name": str(data)}
    assert check_imported(tree) == []


def test_preferences_have_rolls_batch_and_loss():
    config = validate_tree(import_roll(DPO).tree)
    assert config.rollout_batch_size == 2 * 16 * 8  # pairs of two on 8 devices
    assert (config.dpo.loss_type, config.dpo.beta, config.max_steps) == ("sigmoid", 0.1, 500)
    assert config.data is not None
    assert (config.data.prompt_key, config.data.chosen_key) == ("instruction", "chosen")


@pytest.mark.parametrize(
    ("file", "row", "omitted", "steps"),
    [(DPO, PAIR, "", 500), (SFT, ANSWER, "", 2), (SFT, ANSWER, "prompt_key", 2), (DISTILL, QUESTION, "", 2)],
)
def test_a_file_with_its_rows_has_rolls_number_of_steps(
    file: Path, row: dict[str, str], omitted: str, steps: int, tmp_path: Path
):
    """Epochs count, whatever `max_steps` is, but for preferences, which end after the fewer steps."""
    source = yaml.safe_load(file.read_text())
    source.pop(omitted, None)
    source["max_steps"] = source.get("max_steps", 77)
    role = next(name for name in ("student", "sft_train", "actor_train") if name in source)
    source[role]["training_args"]["max_steps"] = 78
    (tmp_path / file.name).write_text(yaml.safe_dump(source))
    tree = make_trial(import_roll(tmp_path / file.name).tree)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    tree["data"] |= {"dataset_name": str(rows), "val_dataset_name": str(rows)}
    tree["output_dir"] = str(tmp_path / "run")
    assert check_imported(tree) == []
    path = tmp_path / "imported.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_run(path).max_steps == steps
    tree["data"]["num_train_epochs"], tree["max_steps"] = 1, 7
    assert [issue.path for issue in check_imported(tree)] == ["max_steps"]


def test_epochs_of_preferences_are_named_with_what_to_set():
    report = by_key(list(import_roll(DPO).keys))["actor_train.training_args.num_train_epochs"]
    assert report.outcome.status == "no counterpart"
    assert "set data.num_train_epochs in its place" in report.outcome.note


def test_fine_tuning_has_rolls_batch_and_columns():
    imported = import_roll(SFT)
    config = validate_tree(imported.tree)
    assert config.rollout_batch_size == 2 * 16  # 8 devices of one replica
    assert config.data is not None
    assert (config.data.prompt_key, config.data.response_key, config.data.shuffle) == ("instruction", "output", False)
    assert (config.data.query_key, config.data.system_key) == ("input", None)
    reports = by_key(list(imported.keys))
    assert reports["validation.data_args.template"].outcome.status == "no effect"
    assert reports["system_envs.USE_MODELSCOPE"].outcome.status == "no effect"


TRAIN, SFT_TRAIN = "actor_train.training_args", "sft_train.training_args"


@pytest.mark.parametrize(
    ("file", "changes", "key", "status", "expected"),
    [
        (DPO, {}, "actor_train.infer_batch_size", "value", 32),  # of 16 pairs
        (DPO, {}, "reference.infer_batch_size", "value", 16),
        (DPO, {"rollout_batch_size": 2048}, f"{TRAIN}.warmup_steps", "same", 20),  # a batch is an optimizer step
        (DPO, {f"{TRAIN}.warmup_steps": None, f"{TRAIN}.warmup_ratio": 0.1}, f"{TRAIN}.warmup_ratio", "value", 7),
        (SFT, {f"{SFT_TRAIN}.warmup_ratio": 0.1, "max_steps": 50}, f"{SFT_TRAIN}.warmup_ratio", "no counterpart", None),
        (SFT, {"is_offload_states": True}, "is_offload_states", "no effect", None),
        (DPO, {"is_offload_states": True}, "is_offload_states", "no counterpart", None),
        (SFT, {"sequence_length": None, "prompt_length": 64, "response_length": 32}, "prompt_length", "value", 96),
        (SFT, {"prompt_length": 64}, "prompt_length", "no effect", None),
        (
            SFT,
            {
                "sft_train.strategy_args.strategy_name": "fsdp2_train",
                f"{SFT_TRAIN}.lr_scheduler_type": "constant",
                f"{SFT_TRAIN}.warmup_steps": 5,
            },
            f"{SFT_TRAIN}.warmup_steps",
            "no effect",
            None,
        ),
        (SFT, {f"{SFT_TRAIN}.lr_scheduler_type": "constant", f"{SFT_TRAIN}.warmup_steps": 5}, f"{SFT_TRAIN}.warmup_steps",
         "renamed", 5),
        (SFT, {"query_key": None}, "query_key", None, None),
        (SFT, {"system_key": "system_prompt"}, "system_key", "renamed", "system_prompt"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_key_of_rows(
    file: Path, changes: dict[str, Any], key: str, status: str | None, expected: object, tmp_path: Path
):
    reports = by_key(translate_roll(write_changed(tmp_path, file, changes))[1])
    found = reports[key].outcome if key in reports else None
    assert (found and found.status, found and found.value) == (status, expected)


def test_a_schedule_of_preferences_that_ends_early_in_roll_is_reported(tmp_path: Path):
    """ROLL divides `max_steps` by the replicas, which its dpo pipeline has not multiplied by them."""
    key = f"{TRAIN}.lr_scheduler_type"
    file = write_changed(tmp_path, DPO, {key: "linear"})
    assert "8th" in by_key(translate_roll(file)[1])[key].outcome.note
    assert not by_key(translate_roll(DPO)[1])[key].outcome.note  # constant


@pytest.mark.parametrize(("file", "role", "expected"), [(DPO, TRAIN, 2 * 8 * 8), (SFT, SFT_TRAIN, 8 * 16)])
def test_a_batch_that_is_left_out_is_rolls(file: Path, role: str, expected: int, tmp_path: Path):
    """8 rows per device."""
    tree, _, _ = translate_roll(write_changed(tmp_path, file, {f"{role}.per_device_train_batch_size": None}))
    assert tree["rollout_batch_size"] == expected


@pytest.mark.parametrize(
    ("engine", "decay", "expected"),
    [("fsdp2_train", 0.01, True), ("fsdp2_train", 0, None), ("megatron_train", 0.01, None)],
)
def test_fsdp2_of_roll_decays_all_weights(engine: str, decay: float, expected: object, tmp_path: Path):
    changes = {"actor_train.strategy_args.strategy_name": engine, f"{TRAIN}.weight_decay": decay}
    tree, _, _ = translate_roll(write_changed(tmp_path, DPO, changes))
    assert tree["actor_train"]["training_args"].get("decay_all_weights") is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"add_tail": False, "teacher_temperature": None, "max_grad_norm": 1.0}),
        ({"logits_topk": 0}, {"add_tail": None}),
        ({"kd_temperature": 2.0}, {"kd_temperature": 2.0, "teacher_temperature": 2.0}),  # of both
        ({"kd_temperature": 2.0, "teacher_temperature": 1.5}, {"teacher_temperature": 3.0}),
        ({"teacher_temperature": 1.5}, {"teacher_temperature": 1.5}),
        ({"max_grad_norm": 0}, {"max_grad_norm": 1e9}),
    ],
)
def test_distributions_and_clipping_of_distillation_are_rolls(
    changes: dict[str, object], expected: dict[str, object], tmp_path: Path
):
    (tmp_path / "distill.yaml").write_text(yaml.safe_dump({**yaml.safe_load(DISTILL.read_text()), **changes}))
    tree, _, _ = translate_roll(tmp_path / "distill.yaml")
    found: dict[str, object] = {
        **tree["distill"],
        "max_grad_norm": tree["actor_train"]["training_args"].get("max_grad_norm"),
    }
    assert {key: found.get(key) for key in expected} == expected


def test_distillation_without_a_bound_on_gradients_clips_nothing(tmp_path: Path):
    text = DISTILL.read_text().replace("max_grad_norm: 1.0", "")
    (tmp_path / "distill.yaml").write_text(text)
    assert translate_roll(tmp_path / "distill.yaml")[0]["actor_train"]["training_args"]["max_grad_norm"] == 1e9


def test_a_students_file_has_its_teacher_and_loss():
    tree, reports, _ = translate_roll(DISTILL)
    assert tree["pipeline"] == "distill"
    assert (tree["pretrain"], tree["sequence_length"]) == ("Qwen/Qwen2.5-7B-Instruct", 2048)
    assert tree["data"]["too_long"] == "truncate"  # as ROLL's tokenizer is called
    assert tree["teacher"]["teacher"]["model_args"]["model_name_or_path"] == "Qwen/Qwen2.5-14B-Instruct"
    assert tree["distill"] == {
        "logits_topk": 64, "distill_loss_weight": 0.85, "kd_objective": "forward_kl", "distill_on_prompt": False,
        "add_tail": False,
    }  # fmt: skip
    assert (tree["data"]["prompt_key"], tree["data"]["response_key"]) == ("question_zh", "answer_zh")
    assert tree["rollout_batch_size"] == 8 * 4
    assert by_key(reports)["logits_transfer_backend"].outcome.status == "no counterpart"


def test_a_trial_of_rows_with_images_has_a_policy_that_reads_them():
    text, images = import_roll(RLVR).tree, import_roll(RLVR).tree
    images["data"]["images_key"] = "images"
    assert "vision" not in make_trial(text).get("tiny", {})
    assert make_trial(images)["tiny"]["vision"] == {}
