"""The policy of a run's folder."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from offbeat.deploy.play.policy import PromptRequest, SamplingParams, TransformersPolicy, policy_folder
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_folders_own_sampling_is_not_the_policys(folder: Path, tmp_path: Path, temperature: float) -> None:
    """As in the engine: Qwen2.5's generation_config.json has a repetition penalty."""
    policy = Path(shutil.copytree(folder / "policy", tmp_path / "policy"))

    def complete() -> object:
        return TransformersPolicy(policy, [0], seed=1).complete(
            [PromptRequest((3, 4, 5), 8)], SamplingParams(temperature, 1.0, -1)
        )

    expected = complete()
    (policy / "generation_config.json").write_text(json.dumps({"repetition_penalty": 5.0, "min_p": 0.5}))
    assert complete() == expected
