"""What files of other libraries take from the environment."""

from pathlib import Path

import pytest

from offbeat.deploy.config.importing.roll import import_roll
from offbeat.deploy.config.importing.verl import import_verl
from offbeat.deploy.config.importing.writing import to_text, to_yaml
from offbeat.deploy.config.loader import compose_tree
from tests.deploy.config.importing.test_roll import write_variant
from tests.deploy.config.importing.test_verl import write

SECRETIVE = """
trainer: {experiment_name: "${oc.env:S}", default_local_dir: "${ oc.env:S}/${data.name}"}
actor_rollout_ref: {model: {path: "${oc.env:S,none}"}, actor: {ppo_mini_batch_size: "${data.train_batch_size}"}}
data: {name: lake, train_batch_size: 96, train_files: "${HOME}/a.parquet", x: "${oc.env:NOT_SET}"}
"""


def test_variables_of_the_environment_are_written_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beside references between keys, which are resolved, whatever else can not be."""
    monkeypatch.setenv("S", "topsecret")
    imported = import_verl(write(tmp_path, "run.yaml", SECRETIVE))
    assert imported.tree["train_env_manager"]["num_env_groups"] == 96
    assert imported.tree["output_dir"] == "${ oc.env:S}/lake"
    assert [issue.path for issue in imported.to_do if "not resolved" in issue.message] == ["data.dataset_name"]
    written = write(tmp_path, "ours.yaml", to_yaml(imported, "verl"))
    assert "topsecret" not in written.read_text() + "".join(to_text(imported, ""))
    tree = compose_tree(written, [])
    assert (tree["output_dir"], tree["pretrain"]) == ("topsecret/lake", "topsecret")
    assert tree["data"]["dataset_name"] == "${HOME}/a.parquet"


def test_a_scripts_variables_of_the_environment_are_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    script = "D=${D:-$HOME/ckpts}\npython3 -m verl.trainer.main_ppo trainer.default_local_dir=${D}/verl"
    written = write(tmp_path, "ours.yaml", to_yaml(import_verl(write(tmp_path, "run.sh", script)), "verl"))
    assert "${oc.env:HOME}/ckpts/verl" in written.read_text()
    assert compose_tree(written, [])["output_dir"] == "/home/me/ckpts/verl"


def test_a_folder_of_the_environment_is_one_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUT", "/data/me")
    imported = import_roll(write_variant(tmp_path, "logging_dir: ${oc.env:OUT}/logs"))
    (tmp_path / "ours.yaml").write_text(to_yaml(imported, "roll"))
    assert imported.tree["logging_dir"] == "${oc.env:OUT}/logs"
    assert compose_tree(tmp_path / "ours.yaml", [])["logging_dir"] == "/data/me/logs"
