"""The policy of a run's folder."""

import json
from dataclasses import asdict
from pathlib import Path

from offbeat.deploy.play.policy import policy_folder
from offbeat.trainer.training.checkpoint import LearnerState


def save(run: Path, step: int, serial: int) -> Path:
    path = run / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "learner.json").write_text(json.dumps(asdict(LearnerState(step, "now", serial=serial))))
    return path


def test_a_runs_policy_is_its_last_written_checkpoint(tmp_path: Path) -> None:
    """Step 10 is of the lineage before the run went back to step 5."""
    save(tmp_path, 10, serial=3)
    newest = save(tmp_path, 8, serial=4)
    (tmp_path / "checkpoints" / ".writing-000001-0-step-000012").mkdir()
    assert policy_folder(tmp_path) == newest


def test_steps_of_seven_digits_follow_those_of_six(tmp_path: Path) -> None:
    save(tmp_path, 999_999, serial=0)
    later = save(tmp_path, 1_000_000, serial=0)
    assert policy_folder(tmp_path) == later
