"""The controller of staleness: what it makes of what it sees, when it acts, what it remembers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from offbeat.services.live_settings import Change, Settings
from offbeat.services.telemetry import Partial
from offbeat.trainer.checks.effects import check_controller_effect
from offbeat.trainer.checks.learner import check_staleness_controller
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.staleness import StalenessControllerConfig
from offbeat.trainer.learner.staleness_controller import (
    StalenessController,
    WindowMeans,
    apply_move,
    judge,
)
from offbeat.trainer.training.checkpoint import read_checkpoint
from tests.fakes import FakeLearnerBuffer, make_group
from tests.trainer.learner.harness import LearnerHarness, learner_config

SETTINGS = Settings(
    num_workers=1, num_replicas=1, learning_rate=1.0, temperature=1.0, max_staleness=2.0, num_env_groups=24
)
GOOD = WindowMeans(mismatch_kl=0.0, ess=1.0, learner_idle=0.0, rollout_idle=0.0)
WAITS_FOR_THE_BOUND = GOOD._replace(learner_idle=0.5, rollout_idle=0.5)


def controller(**given: Any) -> StalenessControllerConfig:
    return StalenessControllerConfig(**given)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (GOOD, None),
        (GOOD._replace(mismatch_kl=0.06), "fresher"),
        (GOOD._replace(ess=0.6), "fresher"),
        (WAITS_FOR_THE_BOUND._replace(ess=0.6), "fresher"),
        (WAITS_FOR_THE_BOUND, "staler"),
        (GOOD._replace(learner_idle=0.5), "more"),
        (GOOD._replace(rollout_idle=0.5), "fewer"),
        (WAITS_FOR_THE_BOUND._replace(mismatch_kl=None, ess=None), None),
    ],
)
def test_each_figure_beyond_its_limit_has_its_remedy(window: WindowMeans, expected: str | None) -> None:
    assert judge(controller(), window) == expected


@pytest.mark.parametrize(
    ("given", "window", "before", "after"),
    [
        ({"max_mismatch_kl": 0.1}, GOOD._replace(mismatch_kl=0.06), "fresher", None),
        ({"min_ess": 0.5}, GOOD._replace(ess=0.6), "fresher", None),
        ({"max_learner_idle": 0.6}, WAITS_FOR_THE_BOUND, "staler", None),
        ({"max_rollout_idle": 0.6}, WAITS_FOR_THE_BOUND, "staler", "more"),
        ({"hysteresis": 0.0}, WAITS_FOR_THE_BOUND._replace(mismatch_kl=0.04), None, "staler"),
        ({"hysteresis": 0.0}, WAITS_FOR_THE_BOUND._replace(ess=0.72), None, "staler"),
        ({"hysteresis": 0.0}, GOOD._replace(rollout_idle=0.5, learner_idle=0.09), None, "fewer"),
    ],
)
def test_each_limit_is_the_configured_one(
    given: dict[str, float], window: WindowMeans, before: Any, after: Any
) -> None:
    assert (judge(controller(), window), judge(controller(**given), window)) == (before, after)


@pytest.mark.parametrize(
    ("move", "given", "values"),
    [
        ("staler", {}, {"max_staleness": 3.0}),
        ("staler", {"staleness_step": 0.5}, {"max_staleness": 2.5}),
        ("staler", {"max_staleness": 2.0}, {}),
        ("fresher", {}, {"max_staleness": 1.0}),
        ("fresher", {"min_staleness": 1.5}, {"max_staleness": 1.5}),
        ("more", {}, {}),
        ("more", {"max_env_groups": 40}, {"num_env_groups": 32}),
        ("fewer", {}, {"num_env_groups": 16}),
        ("fewer", {"min_env_groups": 20}, {"num_env_groups": 20}),
        ("more", {"max_env_groups": 20}, {}),
        ("fewer", {"max_env_groups": 12}, {"num_env_groups": 16}),
        ("fewer", {"min_env_groups": 32, "max_env_groups": 40}, {}),
    ],
)
def test_a_move_stays_within_its_limits(move: Any, given: dict[str, float], values: dict[str, float]) -> None:
    assert apply_move(controller(**given), move, SETTINGS, 8, 24) == values


def test_hysteresis_keeps_a_bound_that_was_lowered_from_rising_at_once() -> None:
    config = controller(max_mismatch_kl=0.05, hysteresis=0.4)
    verdicts = [judge(config, WAITS_FOR_THE_BOUND._replace(mismatch_kl=kl)) for kl in (0.051, 0.049, 0.031, 0.029)]
    assert verdicts == ["fresher", None, None, "staler"]


class Suggested(FakeLearnerBuffer):
    """Notes what is asked for."""

    def __init__(self, playing: int) -> None:
        super().__init__(playing=playing)
        self.asked: list[tuple[int, dict[str, float], str]] = []

    def suggest(self, step: int, values: Any, why: str, *, if_lost: bool = False) -> bool:
        self.asked.append((step, dict(values), why))
        return super().suggest(step, values, why, if_lost=if_lost)


def play(made: StalenessController, steps: range, *, kl: float, wait_s: float = 0.0) -> None:
    for step in steps:
        made.decide(step, SETTINGS)
        made.sample_slots()
        gauges = {"actor/mismatch_kl": Partial("mean", kl, 1.0), "actor/ess": Partial("last", 1.0)}
        made.observe(gauges, {"wait": wait_s, "step": 1.0}, SETTINGS)


class Seen(NamedTuple):
    """What every step of a run measures."""

    mismatch_kl: float
    ess: float
    wait_s: float
    """Of a step of 1 s."""
    playing: int


def asked(seen: Seen, **given: Any) -> list[tuple[int, dict[str, float]]]:
    """What the controller asks for in 30 steps that all measure the same, of a run that obeys."""
    buffer, settings = Suggested(playing=seen.playing), SETTINGS
    made = StalenessController(controller(**given), buffer, groups_per_step=8, num_env_groups=24)
    for step in range(30):
        known = len(buffer.asked)
        made.decide(step, settings)
        for _, values, _ in buffer.asked[known:]:
            settings = settings.changed(values)
        made.sample_slots()
        gauges = {"actor/mismatch_kl": Partial("mean", seen.mismatch_kl, 1.0), "actor/ess": Partial("last", seen.ess)}
        made.observe(gauges, {"wait": seen.wait_s, "step": 1.0}, settings)
    return [(step, values) for step, values, _ in buffer.asked]


@pytest.mark.parametrize(
    ("given", "first"), [({}, 9), ({"interval": 2}, 5), ({"patience": 1}, 5), ({"interval": 1, "patience": 3}, 4)]
)
def test_it_acts_after_so_many_judgements_of_so_many_steps_each(given: dict[str, int], first: int) -> None:
    """Step 0, which waits for the start of everything, is not looked at."""
    buffer = Suggested(playing=24)
    play(
        StalenessController(controller(**given), buffer, groups_per_step=8, num_env_groups=24), range(first + 1), kl=1.0
    )
    assert [(step, values) for step, values, _ in buffer.asked] == [(first, {"max_staleness": 1.0})]
    assert "mismatch KL 1" in buffer.asked[0][2]


def test_judgements_that_differ_do_not_add_up() -> None:
    buffer = Suggested(playing=24)
    made = StalenessController(controller(interval=1), buffer, groups_per_step=8, num_env_groups=24)
    for step in range(0, 12, 2):
        play(made, range(step, step + 1), kl=1.0)
        play(made, range(step + 1, step + 2), kl=0.0)
    assert buffer.asked == []


def test_it_says_what_it_saw() -> None:
    made = StalenessController(controller(), Suggested(playing=18), groups_per_step=8, num_env_groups=24)
    made.sample_slots()
    seen = made.observe({}, {"wait": 0.5, "step": 2.0}, SETTINGS)
    assert {name.removeprefix("staleness_controller/"): each.value for name, each in seen.items()} == {
        "learner_idle": 0.25, "rollout_idle": 0.25, "max_staleness": 2.0, "num_env_groups": 24.0,
    }  # fmt: skip


def test_what_it_has_seen_continues_after_a_checkpoint(tmp_path: Path) -> None:
    one, two = Suggested(playing=24), Suggested(playing=24)
    made = StalenessController(controller(), one, groups_per_step=8, num_env_groups=24)
    play(made, range(8), kl=1.0)
    made.save(tmp_path)
    again = StalenessController(controller(), two, groups_per_step=8, num_env_groups=24)
    again.load(tmp_path, 8)
    play(again, range(8, 11), kl=1.0)  # one more than of a process that is not new
    assert [(step, values) for step, values, _ in two.asked] == [(10, {"max_staleness": 1.0})]


def test_a_redis_that_lost_what_was_decided_gets_it_again(tmp_path: Path) -> None:
    made = StalenessController(controller(interval=1, patience=1), Suggested(24), groups_per_step=8, num_env_groups=24)
    play(made, range(3), kl=1.0)
    made.save(tmp_path)
    lost, knows = Suggested(playing=24), Suggested(playing=24)
    knows.boundary = knows.boundary.__class__((Change({"max_staleness": 1.0}, step=2),))
    for buffer in (lost, knows):
        StalenessController(controller(), buffer, groups_per_step=8, num_env_groups=24).load(tmp_path, 3)
    assert lost.boundary.changes == (Change({"max_staleness": 1.0}, step=3),)
    assert len(knows.boundary.changes) == 1


def test_what_was_decided_is_restored_within_the_limits(tmp_path: Path) -> None:
    """A run that is resumed with a lower `staleness_controller.max_staleness`."""
    made = StalenessController(controller(interval=1, patience=1), Suggested(24), groups_per_step=8, num_env_groups=24)
    play(made, range(3), kl=1.0)
    made.save(tmp_path)
    buffer = Suggested(playing=24)
    limits = controller(min_staleness=0.25, max_staleness=0.5)
    StalenessController(limits, buffer, groups_per_step=8, num_env_groups=24).load(tmp_path, 3)
    assert buffer.boundary.changes == (Change({"max_staleness": 0.5}, step=3),)


def test_a_fork_has_its_own_settings(tmp_path: Path) -> None:
    """The other run's controller had raised its bound; the fork's keys and limits are lower."""
    harness = LearnerHarness(tmp_path)
    harness.config = learner_config(
        max_steps=4, max_staleness=2.0, staleness_controller={"interval": 1, "patience": 1, "min_staleness": 0.0}
    )
    learner, trainer = harness.learner()
    trainer.gauges |= {"actor/mismatch_kl": Partial("mean", 1.0, 1.0), "actor/ess": Partial("last", 0.3)}
    harness.buffer.published = 99
    harness.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers), version=99))
    numbers = iter(range(1000))
    assert learner.run()
    checkpoint = read_checkpoint(harness.folder / "checkpoints" / "step-000004")
    assert json.loads((checkpoint.path / "state" / "staleness.json").read_text())["decided"]
    for name, requested, num_changes in (("moved", False, 1), ("fork", checkpoint.path, 0)):
        again = LearnerHarness(tmp_path / name)
        again.config = learner_config(
            max_steps=5, resume_from_checkpoint=requested, max_staleness=2.0, staleness_controller={}
        )
        again.learner()[0].resume(checkpoint)
        assert len(again.buffer.boundary.changes) == num_changes


def test_a_run_is_steered_by_what_its_steps_measure(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path)
    harness.config = learner_config(
        max_steps=8, max_staleness=4.0, staleness_controller={"interval": 1, "patience": 1, "min_staleness": 2.0}
    )
    learner, trainer = harness.learner()
    trainer.gauges |= {"actor/mismatch_kl": Partial("mean", 1.0, 1.0), "actor/ess": Partial("last", 0.3)}
    harness.buffer.published = 99
    harness.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers), version=99))
    numbers = iter(range(1000))
    assert learner.run()
    bounds = [r.values["staleness_controller/max_staleness"].value for r in harness.sink.of("learner")]
    assert bounds == [4.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert (harness.folder / "checkpoints" / "step-000008" / "state" / "staleness.json").is_file()


def test_without_a_configuration_nothing_is_looked_at_or_kept(tmp_path: Path) -> None:
    buffer = Suggested(playing=0)
    made = StalenessController(None, buffer, groups_per_step=8, num_env_groups=24)
    play(made, range(20), kl=9.0, wait_s=1.0)
    made.save(tmp_path)
    assert not buffer.asked
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "groups", "path"),
    [
        ({"max_staleness": 0.5}, 24, "max_staleness"),
        ({"min_env_groups": 4}, 24, "staleness_controller.min_env_groups"),
        ({"max_env_groups": 16}, 24, "train_env_manager.num_env_groups"),
    ],
)
def test_a_run_that_does_not_start_within_the_limits_is_refused(given: dict[str, Any], groups: int, path: str) -> None:
    config = learner_config(max_staleness=1.0, staleness_controller=given)
    found = list(check_staleness_controller(config, groups_per_step=8, num_env_groups=groups))
    assert [each.path for each in found] == [path]
    fine = learner_config(max_staleness=1.0, staleness_controller={})
    assert not list(check_staleness_controller(fine, groups_per_step=8, num_env_groups=24))


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({"max_env_groups": 8}, "staleness_controller", "its bounds leave one value each, 1 versions and 8 groups"),
        ({"staleness_step": 0.5}, "staleness_controller.staleness_step", "min_staleness and max_staleness of 1:"),
    ],
)
def test_limits_that_leave_nothing_to_change_are_refused(given: dict[str, Any], path: str, says: str) -> None:
    fixed = {"min_staleness": 1.0, "max_staleness": 1.0}
    groups = given.get("max_env_groups", 24)

    def issues(table: dict[str, Any]) -> list[ConfigIssue]:
        config = learner_config(max_staleness=1.0, staleness_controller=table)
        assert not list(check_staleness_controller(config, groups_per_step=8, num_env_groups=groups))
        return [*check_controller_effect(config, groups_per_step=8, num_env_groups=groups)]

    (issue,) = issues(fixed | given)
    assert issue.path == path
    assert says in issue.message
    assert not issues({"max_staleness": 1.0} | given)
    assert groups == 8 or not issues(fixed)


def test_limits_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_staleness 9 is above max_staleness 8"):
        controller(min_staleness=9.0)
    with pytest.raises(ValidationError, match="min_env_groups 9 is above"):
        controller(min_env_groups=9, max_env_groups=8)
