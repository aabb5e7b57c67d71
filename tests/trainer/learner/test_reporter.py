import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from offbeat.services.findings import DiagnosisLimits
from offbeat.services.telemetry import Partial
from offbeat.trainer.learner.progress_view import SilentView
from offbeat.trainer.learner.reporter import LearnerReporter, step_values
from offbeat.trainer.learner.step_groups import StepGroups
from tests.copying import replace
from tests.fakes import DictBoard, ListSink
from tests.trainer.trajectories import group, trajectory

SILENT = {"groups": Partial("sum", 8.0), "groups_without_signal": Partial("sum", 8.0)}
GRADIENT = {"groups": Partial("sum", 8.0), "actor/grad_norm": Partial("last", 0.5)}
BREAKS = {"actor/mismatch_kl_fresh": Partial("mean", 1e-2)}


@dataclass
class ListView(SilentView):
    lines: list[str] = field(default_factory=list[str])

    def print(self, text: str) -> None:
        self.lines.append(text)


def test_a_finding_is_shown_while_it_holds_and_warned_of_once():
    board, view = DictBoard(), ListView()
    reporter = LearnerReporter(ListSink(), board, view)
    for step in range(1, 8):
        reporter.record_step(step, SILENT)
    assert [row["name"] for row in json.loads(board.fields["learner_findings"])] == ["no_signal"]
    assert [line.split(":")[0] for line in view.lines] == ["Warning"]
    for step in range(8, 40):
        reporter.record_step(step, GRADIENT)
    assert json.loads(board.fields["learner_findings"]) == []
    assert len(view.lines) == 1


@pytest.mark.parametrize("is_own", [True, False])
def test_a_learner_that_resumes_compares_with_the_first_step_of_its_run(tmp_path: Path, is_own: bool):
    """Steps of another run's checkpoint are not this run's."""
    before, collapsed = ({"actor/entropy": Partial("mean", entropy)} for entropy in (2.0, 0.05))
    first, board = LearnerReporter(ListSink(), DictBoard()), DictBoard()
    first.record_step(1, GRADIENT | before)
    first.save(tmp_path)
    successor = LearnerReporter(ListSink(), board)
    successor.load(tmp_path, is_own=is_own)
    for step in range(2, 40):
        successor.record_step(step, GRADIENT | collapsed | {"groups_without_signal": Partial("sum", 6.0)})
    names = [row["name"] for row in json.loads(board.fields["learner_findings"])]
    assert names == (["entropy_collapse"] if is_own else [])


def test_a_checkpoint_of_an_earlier_build_has_no_steps_to_compare_with(tmp_path: Path):
    LearnerReporter(ListSink(), DictBoard()).load(tmp_path, is_own=True)


def test_a_run_has_trained_once_a_step_had_a_gradient():
    board = DictBoard()
    LearnerReporter(ListSink(), board).record_step(1, SILENT)
    assert board.fields["learner_has_trained"] == "0"
    LearnerReporter(ListSink(), board).record_step(2, GRADIENT)
    assert board.fields["learner_has_trained"] == "1"
    LearnerReporter(ListSink(), board).record_step(3, SILENT)  # of a learner that took over
    assert board.fields["learner_has_trained"] == "1"


def test_the_first_steps_mismatch_is_compared_with_the_runs_limit():
    loose, strict = ListView(), ListView()
    for view, limit in ((loose, 1.0), (strict, 1e-6)):
        LearnerReporter(ListSink(), DictBoard(), view, limits=DiagnosisLimits(limit)).record_step(1, GRADIENT | BREAKS)
    assert not loose.lines
    assert "actor_infer.model_args.dtype" in strict.lines[0]


def test_trajectories_without_success_count_as_failures_and_are_shown():
    """Only those of an env that reports it at all."""
    rewards = [("lake", {"success": 1.0}), ("lake", {}), ("lake", {"success": 1.0}), ("maze", {})]
    members = tuple(replace(trajectory(0, [(1, 1, 1.0)]), tag=tag, metrics=metrics) for tag, metrics in rewards)
    values = step_values(StepGroups([group(0, *members)]), 0, {}, {})
    assert (values["success"].value, values["success_missing"].value) == pytest.approx((2 / 3, 1 / 3))
    assert "success" not in step_values(StepGroups([group(0, *members[3:], tag="maze")]), 0, {}, {})
