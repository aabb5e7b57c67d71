"""TRL itself, where `offbeat bench peer` has made its venv."""

from pathlib import Path

import pytest

from offbeat.benchmarks.peer.processes import evaluate, run_trl
from offbeat.benchmarks.peer.records import read_trl
from offbeat.benchmarks.peer.settings import (
    SETTINGS,
    evaluate_job,
    offbeat_config,
    train_job,
)
from offbeat.benchmarks.peer.venv import TRL_VENV
from tests.copying import replace

GUEST = TRL_VENV.python_of(TRL_VENV.default_folder())


@pytest.mark.skipif(GUEST is None, reason="TRL's venv is not there: `offbeat bench peer` makes it")
def test_trl_trains_the_policy_and_its_snapshots_can_be_rated(folder: Path, tmp_path: Path) -> None:
    assert GUEST is not None
    setting = replace(SETTINGS["a"], eval_tasks=16)
    config = offbeat_config(setting, 1, 2, folder, tmp_path / "run")
    job = train_job(setting, config, tmp_path, threads=1, max_seconds=60.0, together=False)
    run_trl(GUEST, job, tmp_path, 240.0)
    run = read_trl(tmp_path)
    assert [each.step for each in run.steps] == [1, 2]
    assert [each.step for each in run.snapshots] == [0, 2]
    weights = [(each.folder / "model.safetensors").read_bytes() for each in run.snapshots]
    assert weights[0] != weights[1]
    few = evaluate_job(setting, config, [each.folder for each in run.snapshots], tmp_path / "found.json", threads=1)
    successes = evaluate(GUEST, few, tmp_path, 240.0)
    assert len(successes) == 2
    assert all(0 <= each <= 1 for each in successes)
