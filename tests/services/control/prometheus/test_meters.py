"""Room for series: replicas, dead ones too, leave that of the learner alone."""

import pytest

from offbeat.services.control.prometheus import meters as module
from offbeat.services.control.prometheus.meters import BUCKET_S, WINDOW_BUCKETS, RunMeters
from offbeat.services.telemetry import MetricRecord, Partial

GAUGES = ("version", "running", "waiting", "sessions")
WINDOW_S = BUCKET_S * WINDOW_BUCKETS


def report_replicas(meters: RunMeters, names: range, at: float) -> None:
    for number in names:
        values = {name: Partial("last", 1.0) for name in GAUGES}
        meters.add(MetricRecord("generation", values, labels={"replica": f"r{number}"}), at)


def replicas_of(meters: RunMeters, now: float) -> set[str]:
    return {sample.labels["replica"] for sample in meters.samples(now) if "replica" in sample.labels}


def families_of(meters: RunMeters, now: float) -> set[str]:
    return {sample.family.name for sample in meters.samples(now)}


def test_replicas_leave_room_for_the_learner():
    """1,300 replicas of four gauges report before its first step."""
    meters = RunMeters()
    report_replicas(meters, range(1300), 0.0)
    assert len(replicas_of(meters, 0.0)) == 1300
    meters.add(MetricRecord("learner", {"reward": Partial("mean", 1.0)}, step=1), 3600.0)
    assert "offbeat_learner_reward" in families_of(meters, 3600.0)
    assert meters.num_left_out == 0


def test_dead_replicas_give_their_room_back(monkeypatch: pytest.MonkeyPatch):
    """Each replacement has a name of its own; a control service sees thousands."""
    monkeypatch.setattr(module, "MAX_REPLICA_SERIES", 10 * len(GAUGES))
    meters = RunMeters()
    for generation in range(50):
        at = generation * 2.0 * WINDOW_S
        report_replicas(meters, range(10 * generation, 10 * generation + 10), at)
        assert replicas_of(meters, at) == {f"r{10 * generation + n}" for n in range(10)}
    assert meters.num_left_out == 0


def test_dead_replicas_give_their_room_back_unscraped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_REPLICA_SERIES", 10 * len(GAUGES))
    meters = RunMeters()
    report_replicas(meters, range(10), 0.0)
    report_replicas(meters, range(10, 20), WINDOW_S / 2)
    assert meters.num_left_out == 10 * len(GAUGES), "those that report within the last minute keep it"
    report_replicas(meters, range(10, 20), 2.0 * WINDOW_S)
    assert replicas_of(meters, 2.0 * WINDOW_S) == {f"r{n}" for n in range(10, 20)}
