from pathlib import Path

import pytest

from offbeat.deploy.run_folder import FolderInUseError, locked
from offbeat.deploy.run_removal import remove_run_files
from offbeat.services.buffer.group_ledger import LEDGER_FILE
from offbeat.trainer.learner.step_ledger import STEPS_FILE
from offbeat.trainer.training.batch_log import FOLDER as BATCHES


def run_in(folder: Path) -> Path:
    for name in ("checkpoints/step-000001", "logs", "tensorboard", "trackers/wandb", BATCHES, LEDGER_FILE.parent):
        (folder / name).mkdir(parents=True)
    for name in ("config.yaml", "report.json", "checkpoints/step-000001/learner.json", LEDGER_FILE, STEPS_FILE):
        (folder / name).write_text("{}")
    return folder


def test_what_a_run_wrote_is_removed_and_its_folder_with_it(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    removed = remove_run_files(folder)
    assert not folder.exists()
    assert str(folder / "checkpoints") in removed
    assert str(folder) in removed


def test_what_others_put_there_stays(tmp_path: Path):
    folder = run_in(tmp_path / "home")
    (folder / "thesis.tex").write_text("years of work")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (folder / "logs").rmdir()
    (folder / "logs").symlink_to(elsewhere)
    remove_run_files(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert (elsewhere / "precious").exists()


def test_a_folder_without_a_run_is_left_alone(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    assert remove_run_files(tmp_path) == []
    assert remove_run_files(tmp_path / "nowhere") == []
    assert (tmp_path / "logs").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    with locked(folder), pytest.raises(FolderInUseError):
        remove_run_files(folder)
    assert (folder / "config.yaml").exists()
