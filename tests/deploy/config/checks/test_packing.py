"""Models that can't be packed are refused before the start, by the key that names them."""

import json
from pathlib import Path

import pytest

from offbeat.deploy.config.checks.packing import check_packing
from offbeat.deploy.config.checks.run import check_run, check_settings
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.trainer.models.multimodal import TRAINED_ON_TEXT
from tests.families import write_family, write_multimodal
from tests.paths import CONFIGS, QUICKSTART

FOLDER = "model_args.model_name_or_path"


def problems(*overrides: str, file: Path = QUICKSTART) -> dict[str, str]:
    return {each.path: each.message for each in check_packing(validate_tree(compose_tree(file, list(overrides))))}


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("pretrain", ()),
        (f"reference.{FOLDER}", ("use_kl_loss=true", "kl_loss_coef=0.1")),
        (f"critic.{FOLDER}", ("adv_estimator=gae",)),
        ("reward_pretrain", ("adv_estimator=gae",)),
        (f"teacher.big.{FOLDER}", ()),
    ],
)
def test_each_role_that_packs_is_checked(key: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    write_family(tmp_path / "good", "qwen3")
    write_family(tmp_path / "bad", "mamba2")
    plus = "+" if key.startswith("teacher") else ""
    assert problems(f"{plus}{key}={tmp_path / 'good'}", *overrides) == {}
    found = problems(f"{plus}{key}={tmp_path / 'bad'}", *overrides)
    assert list(found) == [key]
    assert "mamba2 has layers of linear_attention" in found[key]


@pytest.mark.parametrize("family", TRAINED_ON_TEXT)
def test_roles_of_multimodal_models_are_trained_on_text(family: str, tmp_path: Path) -> None:
    write_multimodal(tmp_path, family)
    keys = ("pretrain", f"reference.{FOLDER}", f"critic.{FOLDER}", f"+teacher.big.{FOLDER}")
    others = ("use_kl_loss=true", "kl_loss_coef=0.1", "adv_estimator=gae")
    assert problems(*(f"{key}={tmp_path}" for key in keys), *others) == {}


def test_a_reward_model_is_of_an_architecture_with_a_head(tmp_path: Path) -> None:
    file = CONFIGS / "reward_model.yaml"
    write_family(tmp_path / "good", "qwen3")
    write_family(tmp_path / "bad", "mamba2")
    assert problems(f"pretrain={tmp_path / 'good'}", file=file) == {}
    assert "mamba2" in problems(f"pretrain={tmp_path / 'bad'}", file=file)["pretrain"]


def test_each_role_is_checked_with_its_own_attention(tmp_path: Path) -> None:
    write_family(tmp_path, "stablelm")
    names = (f"pretrain={tmp_path}", f"reference.{FOLDER}={tmp_path}", "use_kl_loss=true", "kl_loss_coef=0.1")
    own = ("actor_train.model_args.attn_implementation=sdpa", "reference.model_args.attn_implementation=auto")
    assert list(problems(*names)) == ["pretrain", f"reference.{FOLDER}"]
    assert problems(*names, own[0]) == {}
    assert list(problems(*names, *own)) == [f"reference.{FOLDER}"]


@pytest.mark.parametrize("key", ["pretrain", f"reference.{FOLDER}"])
def test_prefixes_are_shared_in_tested_families_alone(key: str, tmp_path: Path) -> None:
    shared = "actor_train.model_args.shared_prefix"
    others = (f"{shared}=true", "use_kl_loss=true", "kl_loss_coef=0.1")
    for family, is_refused in (("qwen3", False), ("qwen3_5_text", True)):
        write_family(tmp_path / family, family)
        found = problems(f"{key}={tmp_path / family}", *others)
        assert list(found) == [shared] * is_refused
    assert "'qwen3_5_text', only with llama" in found[shared]


def test_a_run_is_checked_where_its_settings_load_no_model_code(tmp_path: Path) -> None:
    """The control service checks settings on its event loop."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba7"}))
    config = validate_tree(compose_tree(QUICKSTART, [f"pretrain={tmp_path}"]))
    assert any("mamba7" in issue.message for issue in check_run(config, cores=2) if issue.path == "pretrain")
    assert not any("mamba7" in issue.message for issue in check_settings(config, cores=2))
