"""A folder that is no checkpoint is refused before the start, with the one to take instead."""

import json
from pathlib import Path

import pytest

from offbeat.deploy.config.checks.resume import check_resume
from offbeat.deploy.config.loader import load_run
from offbeat.trainer.training.checkpoint import LEARNER, MANIFEST
from tests.paths import QUICKSTART


def problem(folder: Path) -> str:
    config = load_run(QUICKSTART).model_copy(update={"resume_from_checkpoint": folder})
    (issue,) = (*check_resume(config), None)[:1]
    assert issue is None or issue.path == "resume_from_checkpoint"
    return issue.message if issue else ""


def save(path: Path, serial: int, *, complete: bool = True) -> Path:
    path.mkdir(parents=True)
    path.joinpath(LEARNER).write_text(json.dumps({"serial": serial}))
    if complete:
        path.joinpath(MANIFEST).write_text("{}")
    return path


@pytest.mark.parametrize(
    "names",
    [
        ("step-000004.000001-000001", "step-000002.000001-000002"),  # a run's folder in a store
        ("lake/step-000004.000001-000001", "lake/step-000002.000001-000002"),  # a store
        ("checkpoints/step-000004", "checkpoints/step-000002"),  # a run's folder
    ],
)
def test_a_folder_above_checkpoints_names_the_one_written_last(tmp_path: Path, names: tuple[str, str]):
    older, newer = (save(tmp_path / name, serial) for serial, name in enumerate(names))
    newer.parent.joinpath(MANIFEST).write_text("{}")  # the list of a run's checkpoints
    assert problem(tmp_path).endswith(f"take its newest one, {newer}")
    assert problem(older) == problem(newer) == ""


def test_a_checkpoint_that_is_not_complete_is_refused(tmp_path: Path):
    torn = save(tmp_path / "step-000004", 1, complete=False)
    assert problem(torn) == f"{torn} is not a complete checkpoint ({MANIFEST} missing): it holds none either"
    assert "it holds none" in problem(tmp_path)
    torn.joinpath(LEARNER).unlink()
    assert f"({LEARNER} and {MANIFEST} missing)" in problem(torn)
