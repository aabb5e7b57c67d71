"""Profiles of the chosen steps, whose failure costs no step."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from offbeat.deploy.config.loader import load_run
from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.engines.process_group import Ranks, World
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.profiler import profile_step
from tests.paths import QUICKSTART

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
CRITIC = Ranks(0, 0, 1, torch.device("cpu"), World(2, 3, critics=(2,)))


def make_run(folder: Path, *overrides: str) -> LearnerRun:
    config = load_run(QUICKSTART, [f"output_dir={folder}", *overrides])
    settings = LearnerRunConfig.model_validate_json(config.model_dump_json(), extra="ignore")
    return LearnerRun("run", "now", folder, settings)


def train(run: LearnerRun, ranks: Ranks = ALONE) -> None:
    for step in range(1, 5):
        with profile_step(run, ranks, step):
            weight = torch.ones(8, 8, requires_grad=True)
            (weight @ weight).sum().backward()


def names(run: LearnerRun) -> list[str]:
    return sorted(path.name for path in (run.output_dir / "profiler").glob("*"))


def test_listed_steps_have_a_timeline_of_forward_and_backward(tmp_path: Path):
    run = make_run(tmp_path, "profiler_timeline=true", "profiler_steps=[2,4]")
    train(run)
    train(run, CRITIC)
    assert names(run) == [f"step-00000{step}-rank-{rank}.json.gz" for step in (2, 4) for rank in (0, 2)]
    with gzip.open(tmp_path / "profiler" / "step-000002-rank-0.json.gz") as file:
        events = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= events
    assert any("test_profiler.py" in name for name in events)  # Python's stack


def test_nothing_is_profiled_by_default(tmp_path: Path):
    run = make_run(tmp_path)
    train(run)
    assert not (tmp_path / "profiler").exists()


def test_a_profile_that_can_not_be_written_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = make_run(tmp_path, "profiler_timeline=true")
    (tmp_path / "profiler").write_text("a file\n")
    train(run)
    assert caplog.text.count(f"no profile of this step: {tmp_path / 'profiler' / 'step-000003-rank-0.json.gz'}") == 1


def test_a_step_that_fails_raises_its_own_error(tmp_path: Path):
    run = make_run(tmp_path, "profiler_timeline=true")
    with pytest.raises(ValueError, match="of the step"), profile_step(run, ALONE, 3):
        raise ValueError("of the step")


@pytest.mark.parametrize(
    ("settings", "path", "problem"),
    [
        ({"profiler_steps": (5,)}, "profiler_steps", "has no effect without profiler_timeline or profiler_memory"),
        ({"profiler_timeline": True, "max_steps": 2}, "profiler_steps", "numbers from 1 to max_steps, 2"),
        ({"profiler_memory": True}, "profiler_memory", "actor_train.device is cpu"),
    ],
)
def test_settings_that_profile_nothing_are_refused(settings: dict[str, object], path: str, problem: str):
    config = LearnerConfig.model_validate({"actor_train": {"device": "cpu"}, **settings})
    assert [issue.path for issue in check_learner(config) if problem in issue.message] == [path]
