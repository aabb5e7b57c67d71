"""Which steps' weights are published: `model_update_frequency`, and what else needs them."""

import itertools
from pathlib import Path

import pytest

from offbeat.services.buffer.api import Boundary, Reconciled
from offbeat.services.live_settings import Change
from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.learner import LearnerConfig
from tests.fakes import FakeLearnerBuffer, make_group
from tests.otlp import otlp_collector
from tests.trainer.learner.harness import LearnerHarness, finish_evaluations, learner_config


def play_with_newest_weights(harness: LearnerHarness) -> None:
    """Sample groups by the version that is published when the learner waits for them."""
    numbers = itertools.count()

    def play(buffer: FakeLearnerBuffer) -> None:
        buffer.stream.append(make_group(next(numbers), version=max(harness.publisher.versions)))

    harness.buffer.on_empty = play


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        ({"model_update_frequency": 1, "save_steps": 9}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"model_update_frequency": 3, "save_steps": 9}, [0, 3, 6, 7]),
        ({"model_update_frequency": 3, "save_steps": 2}, [0, 2, 3, 4, 6, 7]),
        ({"model_update_frequency": 4, "save_steps": 9, "eval_steps": 5}, [0, 4, 5, 7]),
        ({"model_update_frequency": 9, "save_steps": 9, "max_staleness": 1.0}, [0, 2, 4, 6, 7]),
    ],
    ids=["each step", "frequency and end", "checkpoints", "evaluations", "bound"],
)
def test_versions_are_published_every_n_steps_and_when_needed(
    tmp_path: Path, settings: dict[str, object], published: list[int]
) -> None:
    harness = LearnerHarness(tmp_path, learner_config(max_steps=7, **settings))
    newest = harness.publisher.versions
    play_with_newest_weights(harness)
    finish_evaluations(harness)
    learner, trainer = harness.learner()
    assert learner.run()
    assert list(newest) == published
    assert len(trainer.history) == 7
    assert not harness.buffer.dropped
    lags = [record.values["staleness_max"].value for record in harness.sink.of("learner")]
    assert lags == [step - max(v for v in published if v <= step) for step in range(7)]


def test_a_bound_lowered_during_the_run_is_met_by_publishing_more(tmp_path: Path) -> None:
    """Admission counts published steps: without that version no group of the next step could start."""
    harness = LearnerHarness(tmp_path, learner_config(model_update_frequency=6, save_steps=6, max_steps=4))
    harness.buffer.boundaries = [Boundary()] * 3
    harness.buffer.boundary = Boundary((Change({"max_staleness": 0.0}, step=3),))
    learner, _ = harness.learner()
    play_with_newest_weights(harness)
    assert learner.run()
    assert list(harness.publisher.versions) == [0, 3, 4]


def test_steps_before_a_lowered_bound_are_repeated_by_publishing_more(tmp_path: Path) -> None:
    """Their own bound is the first one, but admission has the lowered one."""
    harness = LearnerHarness(tmp_path, learner_config(model_update_frequency=6, save_steps=6, max_steps=4))
    harness.buffer.boundary = Boundary((Change({"max_staleness": 0.0}, step=12),))
    learner, _ = harness.learner()
    play_with_newest_weights(harness)
    assert learner.run()
    assert list(harness.publisher.versions) == [0, 1, 2, 3, 4]


def test_a_redis_that_lost_data_gets_the_present_weights(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path, learner_config(model_update_frequency=6, save_steps=6))
    learner, trainer = harness.learner()
    fill = harness.buffer.on_empty
    assert fill is not None

    def lose(buffer: FakeLearnerBuffer) -> None:
        fill(buffer)
        if len(trainer.history) == 2 and max(harness.publisher.versions) == 0:
            learner._after_reconciliation(Reconciled(1, is_new=True))

    harness.buffer.on_empty = lose
    assert learner.run()
    assert list(harness.publisher.versions) == [0, 2, 6]


@pytest.mark.parametrize(("bound", "refused"), [(1.0, True), (2.0, False), (1.5, True)])
def test_a_bound_that_the_frequency_exceeds_is_refused(bound: float, refused: bool) -> None:
    config = LearnerConfig.model_validate({"model_update_frequency": 3, "max_staleness": bound})
    found = {issue.path: issue.message for issue in check_learner(config)}
    assert ("model_update_frequency" in found) == refused
    if refused:
        assert "set max_staleness to 2 or more" in found["model_update_frequency"]


def test_each_published_version_links_to_the_steps_behind_it(tmp_path: Path) -> None:
    with otlp_collector() as collector:
        telemetry = {"otlp_endpoint": collector.endpoint}
        harness = LearnerHarness(tmp_path, learner_config(model_update_frequency=3, telemetry=telemetry))
        learner, _ = harness.learner()
        assert learner.run()
    steps = {span.span_id: span.attributes["rl.step"] for span in collector.named("rl.train")}
    assert sorted(steps.values()) == [1, 2, 3, 4, 5, 6]
    synced = {
        span.attributes["rl.policy.version"]: [steps[span_id] for _, span_id, _ in span.links]
        for span in collector.named("rl.sync")
    }
    assert synced == {0: [], 3: [1, 2, 3], 6: [4, 5, 6]}
