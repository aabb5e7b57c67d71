"""A run's state in Redis as metric families."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offbeat.services.buffer.api import Admission, Snapshot
from offbeat.services.control.causes import MAX_REPORT_AGE_S
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.prometheus.families import Family, FamilySample, FamilyType
from offbeat.services.control.run import ComponentReports, LearnerReport, Restarts, RunRecord, RunState, WeightProgress
from offbeat.services.live_settings import LIVE_SETTINGS, Settings
from offbeat.services.weights.replica_reports import ReplicaReport


@dataclass(frozen=True, slots=True)
class ExportedRun:
    now: float
    record: RunRecord
    progress: WeightProgress
    observations: Mapping[str, Observation]
    restarts: Mapping[str, Restarts]
    reports: ComponentReports
    learner: LearnerReport
    buffer: Snapshot
    settings: Settings


def _gauge(name: str, about: str, *labels: str) -> Family:
    return Family(name, FamilyType.GAUGE, about, labels)


def _counter(name: str, about: str, *labels: str) -> Family:
    return Family(name, FamilyType.COUNTER, about, labels)


REDIS_UP = _gauge("offbeat_redis_up", "1 while Redis answers; with 0 there is no other metric.")
REDIS_REFUSES = _gauge("offbeat_redis_refuses_writes", "1 while Redis refuses writes: its memory or disk is full.")
LEFT_OUT = _gauge("offbeat_run_values_left_out", "Values of further series since the run has as many as are kept.")

STATE = _gauge("offbeat_run_state", "1 for the run's `state`, 0 for others.", "state")
STEP = _gauge("offbeat_run_step", "Optimizer batches behind the published weights; -1 before the first.")
MAX_STEPS = _gauge("offbeat_run_max_steps", "Optimizer batches after which the run is finished.")
VERSION = _gauge("offbeat_run_version", "Newest published weight version; -1 before the first.")
STARTED = _gauge("offbeat_run_started_timestamp_seconds", "Start of the current attempt, Unix time.")
RECONCILED = _gauge("offbeat_run_reconciled_timestamp_seconds", "Last reconciliation, Unix time.")
FINDING = _gauge("offbeat_run_finding", "1 for each finding of the run's diagnosis (docs/rest.md).", "finding")
READY = _gauge("offbeat_component_ready", "1 if the component is ready or done.", "component")
RESTARTS = _counter("offbeat_component_restarts", "Deaths of the component that a restart followed.", "component")
LEASED = _gauge("offbeat_learner_leased", "1 while a learner holds the run.")
STAGE = _gauge("offbeat_learner_stage", "1 for what the learner does now (`stage`).", "stage")
STAGE_STARTED = _gauge("offbeat_learner_stage_started_timestamp_seconds", "Since when it does that, Unix time.")
ADMITTED = _counter("offbeat_groups_admitted", "Groups whose episodes may be played.")
SUBMITTED = _counter("offbeat_groups_submitted", "Groups that were complete.")
TRAINED = _counter("offbeat_groups_trained", "Groups in a durable checkpoint.")
DROPPED = _counter("offbeat_groups_dropped", "Groups dropped, by `reason`.", "reason")
FAILED = _counter("offbeat_groups_failed", "Groups whose episodes failed, by `reason`.", "reason")
BUFFER = _gauge(
    "offbeat_buffer_groups", "Groups in the buffer: `state` is playing, ready or consumed (not yet durable).", "state"
)
QUEUED = _gauge("offbeat_buffer_queued_episodes", "Episodes that wait for a worker, by `kind`.", "kind")
ADMISSION = _gauge(
    "offbeat_buffer_admission", "1 for what limits the admission of groups now (`limit`), 0 for others.", "limit"
)
QUARANTINED = _gauge("offbeat_buffer_quarantined_trajectories", "Undecodable trajectories kept, 16 at most.")
PLAYING = _gauge("offbeat_worker_episodes", "Episodes that the worker holds.", "worker")
SILENT = _gauge("offbeat_worker_silent_seconds", "Time since the worker's last heartbeat.", "worker")
REPLICA_VERSION = _gauge("offbeat_replica_version", "Weight version that the replica serves; -1: none yet.", "replica")
REPLICA_LAG = _gauge("offbeat_replica_lag_versions", "Published versions that the replica is behind.", "replica")
REPLICA_REQUESTS = _gauge(
    "offbeat_replica_requests", "Unanswered requests of the replica: `state` is running or waiting.", "replica", "state"
)
SETTINGS = {
    name: _gauge(f"offbeat_setting_{name}", f"{setting.info.about} (`{setting.info.path}`).")
    for name, setting in LIVE_SETTINGS.items()
}
MESH_FAMILIES = (REDIS_UP, REDIS_REFUSES)
STATE_FAMILIES = (
    *(*MESH_FAMILIES, STATE, STEP, MAX_STEPS, VERSION, STARTED, RECONCILED, FINDING, LEFT_OUT),
    *(READY, RESTARTS, LEASED, STAGE, STAGE_STARTED),
    *(ADMITTED, SUBMITTED, TRAINED, DROPPED, FAILED),
    *(BUFFER, QUEUED, ADMISSION, QUARANTINED, PLAYING, SILENT, REPLICA_VERSION, REPLICA_LAG, REPLICA_REQUESTS),
    *SETTINGS.values(),
)
"""Families of a mesh and its runs; those in `MESH_FAMILIES` lack the label `run`."""


def state_samples(run: ExportedRun) -> Iterator[FamilySample]:
    """Yield a run's samples, without the label `run`."""
    yield from _of_record(run)
    yield from _of_components(run)
    yield from _of_groups(run)
    yield from _of_buffer(run.buffer)
    for name, report in run.reports.replicas.items():
        if run.now - report.at < MAX_REPORT_AGE_S:
            yield from _of_replica(report, name, run.progress.version)
    for name, family in SETTINGS.items():
        yield FamilySample(family, float(getattr(run.settings, name)))


def _of_record(run: ExportedRun) -> Iterator[FamilySample]:
    for state in RunState:
        yield FamilySample(STATE, float(run.record.state is state), {"state": state.value})
    yield FamilySample(STEP, run.progress.step)
    yield FamilySample(MAX_STEPS, run.record.max_steps)
    yield FamilySample(VERSION, run.progress.version)
    yield FamilySample(STARTED, run.record.started_at)
    yield FamilySample(RECONCILED, run.record.beat)
    for finding in run.learner.findings:
        yield FamilySample(FINDING, 1.0, {"finding": finding.name})


def _of_components(run: ExportedRun) -> Iterator[FamilySample]:
    for name, observation in run.observations.items():
        is_ready = observation.health in (Health.READY, Health.DONE)
        deaths = run.restarts.get(name, Restarts()).total
        yield FamilySample(READY, float(is_ready), {"component": name})
        yield FamilySample(RESTARTS, deaths, {"component": name}, "_total")
    yield FamilySample(LEASED, float(run.reports.leased))
    doing = run.learner.doing
    if stage := doing.get("stage"):
        yield FamilySample(STAGE, 1.0, {"stage": str(stage)})
        yield FamilySample(STAGE_STARTED, float(doing.get("since", run.now)))


def _of_groups(run: ExportedRun) -> Iterator[FamilySample]:
    counters = run.buffer.counters
    yield FamilySample(ADMITTED, counters.admitted, suffix="_total")
    yield FamilySample(SUBMITTED, counters.submitted, suffix="_total")
    yield FamilySample(TRAINED, counters.trained, suffix="_total")
    for family, reasons in ((DROPPED, counters.dropped), (FAILED, counters.failed)):
        for reason, number in reasons.items():
            yield FamilySample(family, number, {"reason": reason}, "_total")


def _of_buffer(buffer: Snapshot) -> Iterator[FamilySample]:
    for state, number in (("playing", buffer.playing), ("ready", buffer.ready), ("consumed", buffer.consumed)):
        yield FamilySample(BUFFER, number, {"state": state})
    for kind, number in (("train", buffer.queued_train), ("eval", buffer.queued_eval)):
        yield FamilySample(QUEUED, number, {"kind": kind})
    for limit in Admission:
        yield FamilySample(ADMISSION, float(buffer.admission is limit), {"limit": limit.value})
    yield FamilySample(QUARANTINED, buffer.quarantined)
    for worker in buffer.workers:
        yield FamilySample(PLAYING, worker.episodes, {"worker": worker.worker_id})
        yield FamilySample(SILENT, worker.silent_s, {"worker": worker.worker_id})


def _of_replica(report: ReplicaReport, name: str, newest: int) -> Iterator[FamilySample]:
    yield FamilySample(REPLICA_VERSION, report.version, {"replica": name})
    if report.version >= 0:
        yield FamilySample(REPLICA_LAG, max(newest - report.version, 0), {"replica": name})
    running = report.load.running - report.load.waiting
    for state, number in (("running", running), ("waiting", report.load.waiting)):
        yield FamilySample(REPLICA_REQUESTS, number, {"replica": name, "state": state})
