"""What AReaL's actor learns by, where it differs from ours in a way that only its code shows."""

from pathlib import Path

import pytest

from offbeat.deploy.config.importing.areal import import_areal
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.rules import get


def convert(folder: Path, keys: str, others: str = "", kind: str = "rl") -> Imported:
    path = folder / "config.yaml"
    path.write_text(
        f"actor: {{path: org/model, {keys}}}\ntrain_dataset: {{path: a.jsonl, batch_size: 8, type: {kind}}}\n{others}"
    )
    return import_areal(path)


def outcomes(imported: Imported) -> dict[str, tuple[str, str]]:
    return {".".join(each.key): (each.outcome.status, each.outcome.note) for each in imported.keys if each.key}


@pytest.mark.parametrize(
    ("keys", "others", "kind", "is_remarked"),
    [
        ("dtype: bfloat16", "", "rl", True),
        ("kl_ctl: 0.0", "", "rl", False),
        ("dtype: bfloat16", "ref: {path: org/model}\n", "rl", False),
        ("dtype: bfloat16", "", "sft", False),
    ],
)
def test_the_default_kl_without_a_reference_is_remarked_on(
    keys: str, others: str, kind: str, is_remarked: bool, tmp_path: Path
):
    remarks = convert(tmp_path, keys, others, kind).remarks
    assert any("kl_ctl" in remark for remark in remarks) == is_remarked


@pytest.mark.parametrize(
    ("levels", "key"),
    [
        ("mean_level: group, std_level: batch", "std_level"),
        ("mean_level: group", "mean_level"),  # the deviation is of the batch by default
        ("mean_level: null, std_level: batch", "std_level"),
    ],
)
def test_a_deviation_about_other_means_is_noted(levels: str, key: str, tmp_path: Path):
    found = outcomes(convert(tmp_path, f"reward_norm: {{{levels}}}"))
    assert "raw rewards" in found[f"actor.reward_norm.{key}"][1]


def test_a_deviation_about_its_own_mean_is_not_noted(tmp_path: Path):
    found = outcomes(convert(tmp_path, "reward_norm: {mean_level: batch, std_level: batch}"))
    assert found["actor.reward_norm.std_level"] == ("renamed", "")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("disabled", None),
        ("token_mask", {"is_weight": {"weight_type": "token", "upper_bound": 3.0},
                        "filters": [{"agg_type": "token", "ratio_high": 3.0}]}),
        ("token_truncate", {"is_weight": {"weight_type": "token", "upper_bound": 3.0}}),
        ("sequence_truncate", {"is_weight": {"weight_type": "geometric", "upper_bound": 3.0}}),
        ("sequence_mask", {"is_weight": {"weight_type": "geometric", "upper_bound": 3.0},
                           "filters": [{"agg_type": "geometric", "ratio_high": 3.0}]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["behave", "behav"])
def test_a_cap_of_older_areal_has_its_mode(name: str, mode: str, expected: object, tmp_path: Path):
    keys = f"use_decoupled_loss: true, {name}_imp_weight_cap: 3.0, {name}_imp_weight_mode: {mode}"
    imported = convert(tmp_path, keys)
    assert get(imported.tree, "train_infer_correction") == expected
    assert outcomes(imported)[f"actor.{name}_imp_weight_mode"][0] == "same"


def test_the_temperature_of_logprobs_is_one_by_default(tmp_path: Path):
    """AReaL divides logits by actor.temperature, which is not the sampling's unless the file says so."""
    sampling = "gconfig: {temperature: 0.7}\n"
    assert any("temperature" in remark for remark in convert(tmp_path, "kl_ctl: 0", sampling).remarks)
    assert not any("temperature" in remark for remark in convert(tmp_path, "kl_ctl: 0").remarks)
    assert outcomes(convert(tmp_path, "temperature: 1.0"))["actor.temperature"][0] == "same"


def test_rejected_groups_count_in_the_mean(tmp_path: Path):
    assert any("rejected groups" in remark for remark in convert(tmp_path, "kl_ctl: 0", "dynamic_bs: true\n").remarks)
    assert not any("rejected groups" in remark for remark in convert(tmp_path, "kl_ctl: 0").remarks)


def test_a_name_with_a_variable_is_left_out(tmp_path: Path):
    names = 'experiment_name: "${oc.env:USER}-exp"\ntrial_name: t\n'
    imported = convert(tmp_path, "kl_ctl: 0", names)
    assert "exp_name" not in imported.tree
    assert outcomes(imported)["experiment_name"] == ("no counterpart", "set exp_name")
