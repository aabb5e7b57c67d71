from offbeat.services.buffer.members import Addition
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    StopReason,
    Trajectory,
    Turn,
)
from offbeat.services.reward.sample import RewardSample, as_member
from offbeat.services.rollout.metrics import OWN_METRICS, OWN_PREFIXES, WorkerMetrics
from offbeat.services.telemetry import Partial, merge_all

TRAIN = EpisodeKind.TRAIN


def reported(metrics: dict[str, float]) -> dict[str, Partial]:
    """All that a worker records, of a failed, a cancelled and two played episodes, a baseline among them, and a group."""
    reporter = WorkerMetrics("w")
    turns = (Turn(0, 0, 1, 0.5), Turn(0, 1, 2, 0.25))
    reporter.env_call(TRAIN, "Lake", 0.1)
    reporter.turn(TRAIN, "Lake", Completion("r", (7,)), 0.2)
    reporter.scored(TRAIN, "Lake", 0.3)
    reporter.group_scored("Lake", [], [], 0.3)
    reporter.failed(TRAIN, "Lake", "step_error")
    reporter.cancelled(TRAIN, "Lake")
    for baseline in (False, True):
        reporter.finished(
            TRAIN,
            Trajectory("g", 0, 0, "Lake", 1, (), turns, StopReason.TERMINATED, metrics, baseline=baseline),
        )
    reporter.submitted(TRAIN, "Lake", "accepted")
    records = reporter.records(playing=1, hung_threads=0, calls=1, cpu_s=0.0, failed_attempts={}, episode_limit=8)
    return merge_all(record.values for record in records)


def test_the_workers_counts_use_the_reserved_names():
    assert {name for name in reported({}) if not name.startswith(OWN_PREFIXES)} == OWN_METRICS


def test_an_envs_metrics_do_not_collide_with_the_workers_counts():
    names = (*OWN_METRICS, "stop/terminated", "failed/step_error", "submitted/accepted")
    values = reported({"moves": 2.0, **dict.fromkeys(names, 9.0)})
    assert {name: values.pop(f"env/{name}").value for name in names} == dict.fromkeys(names, 9.0)
    assert values.pop("moves").value == 2.0
    assert values == reported({})


def test_a_compared_episodes_reward_is_counted_once_it_is_whole():
    reporter = WorkerMetrics("w")
    turns = (Turn(0, 0, 1, 0.5),)
    played = Trajectory("g", 0, 0, "Lake", 1, (), turns, StopReason.TERMINATED, {"reward/own": 1.0})
    reporter.finished(TRAIN, played, is_scored=False)
    member = as_member(RewardSample((), "a"), {"own": 1.0}, own_reward=0.5)
    reporter.group_scored("Lake", [member, member], [Addition(1.0, {"reward/better": 0.0})] * 2, 0.3)
    records = reporter.records(playing=0, hung_threads=0, calls=0, cpu_s=0.0, failed_attempts={})
    values = merge_all(record.values for record in records)
    assert (values["reward"].count, values["reward"].value) == (2.0, 1.5)
    assert values["reward/own"].count == 1.0
    assert (values["reward/better"].count, values["reward/better"].value) == (2.0, 0.0)
