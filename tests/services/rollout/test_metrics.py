from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    StopReason,
    Trajectory,
    Turn,
)
from offbeat.services.rollout.metrics import OWN_METRICS, OWN_PREFIXES, WorkerMetrics
from offbeat.services.telemetry import Partial, merge_all

TRAIN = EpisodeKind.TRAIN


def reported(metrics: dict[str, float]) -> dict[str, Partial]:
    """All that a worker records, of a failed, a cancelled and two played episodes, a baseline among them."""
    reporter = WorkerMetrics("w")
    turns = (Turn(0, 0, 1, 0.5), Turn(0, 1, 2, 0.25))
    reporter.env_call(TRAIN, "Lake", 0.1)
    reporter.turn(TRAIN, "Lake", Completion("r", (7,)), 0.2)
    reporter.scored(TRAIN, "Lake", 0.3)
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
