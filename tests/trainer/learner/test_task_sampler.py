"""The learner's side of a task sampler: each trained group is learnt from once in the lineage of weights that survives."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from offbeat.envs.task_samplers import Levels
from offbeat.trainer.learner.task_sampler import Curriculum
from tests.fakes import FakeLearnerBuffer, make_group


def test_without_a_sampler_nothing_is_said_or_kept(tmp_path: Path) -> None:
    buffer = FakeLearnerBuffer()
    nothing = Curriculum(None, buffer)
    nothing.publish()
    nothing.observe([make_group(0)])
    nothing.save(tmp_path)
    nothing.load(tmp_path)
    assert buffer.taught == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_learnt_is_reported_kept_and_continued(tmp_path: Path) -> None:
    group = make_group(0)
    tags = (group.tag, "hard")
    buffer = FakeLearnerBuffer()
    first = Curriculum(Levels(tags, at=1.0, window=4), buffer)
    first.publish()
    first.observe([group])
    success = sum(each.metrics.get("success", 0.0) for each in group.trajectories) / len(group.trajectories)
    assert [json.loads(state)["seen"] for state in buffer.taught] == [[], [success]]
    first.save(tmp_path)
    again = Curriculum(Levels(tags, at=1.0, window=4), buffer)
    again.load(tmp_path)
    again.publish()
    assert buffer.taught[-1] == buffer.taught[-2]
    again.observe([group])
    assert json.loads(buffer.taught[-1])["seen"] == [success, success]


@pytest.mark.parametrize("metrics", [{"success": math.nan}, {}])
def test_a_success_that_is_not_reported_is_none(metrics: dict[str, float]) -> None:
    """As in evaluations."""
    group = make_group(0)
    members = tuple(structs.replace(each, metrics=metrics) for each in group.trajectories)
    buffer = FakeLearnerBuffer()
    Curriculum(Levels((group.tag, "hard")), buffer).observe([replace(group, trajectories=members)])
    assert json.loads(buffer.taught[-1])["seen"] == [0.0]


def test_what_another_sampler_knew_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "task_sampler.json").write_text(json.dumps({"mine": 1}))
    with pytest.raises(ValueError, match="is not a state of Levels"):
        Curriculum(Levels(("tag", "hard")), FakeLearnerBuffer()).load(tmp_path)
