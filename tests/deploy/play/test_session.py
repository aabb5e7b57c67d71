"""The policy of a run's configuration."""

import json
import shutil
from pathlib import Path

import pytest

from offbeat.deploy.config import hub
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.session import find_policy
from offbeat.trainer.training.checkpoint import UPLOADED
from tests.deploy.play.test_policy import save
from tests.paths import QUICKSTART


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> RunConfig:
    """A run on a model folder that was stopped before its first checkpoint."""
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}/run", f"pretrain={folder / 'policy'}"])
    (config.output_dir / "checkpoints" / ".epoch-000001").mkdir(parents=True)
    return config


def test_a_run_without_a_checkpoint_plays_by_what_it_starts_from(config: RunConfig, folder: Path):
    assert find_policy(config) == folder / "policy"
    with pytest.raises(ValueError, match="holds no checkpoints: train first"):
        find_policy(config.model_copy(update={"pretrain": "tiny"}))


def test_a_run_that_starts_from_an_adapter_is_not_played_by_its_base(config: RunConfig, folder: Path):
    args = config.actor_train.model_args.model_copy(update={"adapter_name_or_path": "sft"})
    adapted = config.model_copy(update={"actor_train": config.actor_train.model_copy(update={"model_args": args})})
    with pytest.raises(
        ValueError, match=r"run holds no checkpoints, and pretrain is without .*adapter_name_or_path \(sft\)"
    ):
        find_policy(adapted)
    assert find_policy(adapted, folder / "policy") == folder / "policy"
    newest = save(config.output_dir, 4, serial=0)
    shutil.copy(folder / "policy" / "model.safetensors", newest)
    assert find_policy(adapted) == newest


def test_a_runs_checkpoint_goes_before_what_it_starts_from(config: RunConfig, folder: Path):
    newest = save(config.output_dir, 4, serial=0)
    shutil.copy(folder / "policy" / "model.safetensors", newest)
    assert find_policy(config) == newest


def test_a_checkpoint_that_is_only_in_a_store_is_named(config: RunConfig):
    described = {"name": "0-000004", "step": 4, "lineage": "now", "serial": 0, "epoch": 1}
    uploaded = {"url": "s3://bucket/run", "checkpoints": [described]}
    (config.output_dir / "checkpoints" / UPLOADED).write_text(json.dumps(uploaded))
    with pytest.raises(ConfigError, match="only in a store: download s3://bucket/run/0-000004"):
        find_policy(config)


def test_a_model_of_a_hub_is_downloaded(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "download", {"org/model": str(folder / "policy")}.__getitem__)
    assert find_policy(config.model_copy(update={"pretrain": "org/model"})) == folder / "policy"
