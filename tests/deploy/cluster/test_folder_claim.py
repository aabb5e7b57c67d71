import errno
from pathlib import Path

import pytest

from offbeat.deploy.cluster.run_factory import claim_folder
from offbeat.deploy.config.loader import compose_tree, load_run, validate_tree
from offbeat.deploy.config.run import RunConfig
from tests.paths import QUICKSTART


def run_config(folder: Path, *overrides: str) -> RunConfig:
    return validate_tree(compose_tree(QUICKSTART, [f"output_dir={folder}", *overrides]))


def test_earlier_run_is_moved_aside_once(tmp_path: Path):
    folder = tmp_path / "run"
    claim_folder(run_config(folder), "first")
    assert (folder / "config.yaml").stat().st_mode & 0o777 == 0o600, (
        "it contains the API's token and the Redis password"
    )
    (folder / "report.json").write_text("{}")
    claim_folder(run_config(folder), "second")
    (folder / "checkpoints").mkdir()
    claim_folder(run_config(folder), "second")
    assert (folder / "checkpoints").is_dir()
    assert (tmp_path / "run.1" / "report.json").is_file()
    assert not (tmp_path / "run.2").exists()


def test_resumed_run_keeps_its_folder(tmp_path: Path):
    folder = tmp_path / "run"
    claim_folder(run_config(folder), "first")
    (folder / "checkpoints").mkdir()
    claim_folder(run_config(folder, "resume_from_checkpoint=true"), "second")
    assert (folder / "checkpoints").is_dir()


def test_configuration_is_written_to_the_folder(tmp_path: Path):
    claim_folder(run_config(tmp_path / "run", "seed=7"), "first")
    assert load_run(tmp_path / "run" / "config.yaml").seed == 7


def test_a_resume_with_other_keys_writes_its_configuration(tmp_path: Path):
    """A run that is resumed by the control service has claimed its folder before."""
    folder = tmp_path / "run"
    claim_folder(run_config(folder, "max_steps=7"), "first")
    (folder / "checkpoints").mkdir()
    claim_folder(run_config(folder, "max_steps=9", "resume_from_checkpoint=true"), "first")
    assert load_run(folder / "config.yaml").max_steps == 9
    assert (folder / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [".claim", ".offbeat-run", "checkpoints", "config.yaml"]


def test_a_full_disk_leaves_the_configuration_of_a_resumed_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The learner waits for room; a first start has no configuration to fall back on."""
    folder = tmp_path / "run"
    claim_folder(run_config(folder, "max_steps=7"), "first")

    def write_nothing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_nothing)
        claim_folder(run_config(folder, "max_steps=9", "resume_from_checkpoint=true"), "first")
        with pytest.raises(OSError, match="No space left"):
            claim_folder(run_config(tmp_path / "other"), "second")
    assert load_run(folder / "config.yaml").max_steps == 7
