"""Explanation of a run's wait: a chain of current reports from the learner to the busy component; unknown states stay
unknown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.services.buffer.api import Admission, GroupProgress, Snapshot
from offbeat.services.control.failed_groups import advise_failed
from offbeat.services.control.failing_episodes import FailingEpisodes
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import LearnerReport, RunRecord, RunState
from offbeat.services.weights.replica_reports import ReplicaReport

MAX_REPORT_AGE_S = 5.0
UNATTENDED_AFTER_S = 15.0
"""Age of the last reconciliation."""
MIN_REPORTED_WAIT_S = 0.05
SLOW_FETCH_AFTER_S = 30.0
EVALUATING = "evaluating"


@dataclass(frozen=True, slots=True)
class Cause:
    """Component and what it waits for."""

    component: str
    """`learner`, `group 41`, `episodes`, `env workers`, `generation`, `env`, `agent`, `run`, `redis`, or a component.
    """
    state: str
    """One word: `waits`, `trains`, `loads`, `samples`, `absent`, ..."""
    text: str
    """Clause for humans."""
    waits_for: str | None = None
    """Next link; None if busy."""
    since_s: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Input of `chain`."""

    now: float
    record: RunRecord
    observations: Mapping[str, Observation]
    learner: LearnerReport
    buffer: Snapshot
    groups: Sequence[GroupProgress]
    workers: Mapping[str, Mapping[str, Any]]
    """Worker -> report; see `offbeat.services.rollout.wait_status`."""
    replicas: Mapping[str, ReplicaReport]
    version: int
    """Newest published version; -1: none."""
    leased: bool = True
    redis_trouble: str = ""
    """Error of a Redis that refuses writes."""


def chain(snapshot: RunSnapshot) -> list[Cause]:
    """Return the chain, waiting component first; never empty."""
    return [
        *_refused(snapshot),
        *_chain(snapshot),
        *_failing(snapshot),
        *_failed(snapshot),
        *(Cause("training", finding.name, f"diagnosis: {finding}") for finding in snapshot.learner.findings),
        *_unattended(snapshot),
    ]


def _failing(snapshot: RunSnapshot) -> list[Cause]:
    """Report episodes that often fail: as they are retried, only passing ones are trained."""
    failing = FailingEpisodes.of(snapshot.workers.values(), since=snapshot.record.started_at)
    if snapshot.record.state.is_terminal or not failing.many_fail:
        return []
    detail = {"failed": failing.recent_failed, "of": failing.recent, "trace": failing.trace}
    return [Cause("episodes", "fail", failing.describe_many(), detail=detail)]


def _failed(snapshot: RunSnapshot) -> list[Cause]:
    """Report failed groups: the survivors are a biased sample."""
    counters = snapshot.buffer.counters
    if snapshot.record.state.is_terminal or not counters.failed:
        return []
    return [Cause("groups", "failed", advise_failed(counters.failed), detail=dict(counters.failed))]


def _refused(snapshot: RunSnapshot) -> list[Cause]:
    """Report refused writes first: they outdate other reports."""
    if not snapshot.redis_trouble or snapshot.record.state.is_terminal:
        return []
    text = f"{snapshot.redis_trouble}: everything waits for it and resumes on its own; what follows was reported before"
    return [Cause("redis", "refuses", text)]


def _unattended(snapshot: RunSnapshot) -> list[Cause]:
    """Report a missing reconciler: nothing dead is replaced."""
    silent_s = snapshot.now - snapshot.record.beat
    if (
        snapshot.record.state.is_terminal
        or snapshot.redis_trouble
        or not snapshot.record.beat
        or silent_s < UNATTENDED_AFTER_S
    ):
        return []
    text = f"and the run has not been reconciled for {silent_s:.0f} s: the control service hangs or is being replaced"
    return [Cause("control", "silent", text, None, silent_s)]


def _chain(snapshot: RunSnapshot) -> list[Cause]:
    record = snapshot.record
    match record.state:
        case RunState.FINISHED | RunState.STOPPED | RunState.FAILED:
            why = f": {record.error}" if record.error else ""
            return [Cause("run", record.state.value, f"Nothing waits: the run is {record.state}{why}")]
        case RunState.PREPARING:
            return [Cause("run", "preparing", "The run makes its folder and its model ready")]
        case RunState.STARTING:
            return _starting(snapshot)
        case RunState.DRAINING:
            return _draining(snapshot)
        case RunState.PAUSED:
            return _paused(snapshot)
        case RunState.RUNNING:
            return _running(snapshot)


def sentence(links: Sequence[Cause]) -> str:
    clauses = "; ".join(link.text for link in links)
    return f"{clauses[:1].upper()}{clauses[1:]}."


def _starting(snapshot: RunSnapshot) -> list[Cause]:
    missing = {
        name: observation
        for name, observation in snapshot.observations.items()
        if observation.health is not Health.READY
    }
    if not missing:
        return [Cause("run", "starting", "The run starts; no part of it has been looked at yet")]
    names = _listed(sorted(missing))
    links = [Cause("run", "waits", f"The run starts and waits for {names}", next(iter(missing)))]
    links += [_component(snapshot, name, observation) for name, observation in missing.items()]
    return [*links, *_slow_fetches(snapshot)]


def _component(snapshot: RunSnapshot, name: str, observation: Observation) -> Cause:
    detail = snapshot.learner.phase if name == "learner" and observation.health is Health.STARTING else ""
    detail = detail or observation.detail
    clause = f"{_the(name)} is {observation.health}" + (f" ({detail})" if detail else "")
    return Cause(name, observation.health.value, clause, detail={"detail": detail, "log": observation.log})


def _draining(snapshot: RunSnapshot) -> list[Cause]:
    remaining = [
        name
        for name, observation in snapshot.observations.items()
        if observation.health in (Health.READY, Health.STARTING)
    ]
    since = snapshot.now - snapshot.record.draining_at
    first = Cause(
        "run", "draining", f"The run ends since {since:.1f} s and waits for {_listed(remaining)}", None, since
    )
    if "learner" not in remaining:
        return [first]
    doing = _learner_busy(snapshot) or Cause("learner", "ends", "the learner ends its step and saves a checkpoint")
    return [Cause("run", "draining", first.text, "learner", since), doing]


def _paused(snapshot: RunSnapshot) -> list[Cause]:
    playing = sum(worker.episodes for worker in snapshot.buffer.workers)
    rest = f"; {playing} running episodes finish first" if playing else ""
    learner = _learner_busy(snapshot)
    text = f"The run is paused: `offbeat runs resume {snapshot.record.run_id}` resumes it{rest}"
    return [Cause("run", "paused", text), *([learner] if learner else [])]


def _running(snapshot: RunSnapshot) -> list[Cause]:
    observation = snapshot.observations.get("learner")
    if observation is not None and observation.health in (Health.DEAD, Health.ABSENT, Health.BROKEN):
        return [*_rollouts_wait(snapshot), _no_learner(snapshot, observation)]
    if not snapshot.leased:
        phase = f" ({snapshot.learner.phase})" if snapshot.learner.phase else ""
        starting = Cause("learner", "starting", f"the learner starts and does not hold the run yet{phase}")
        return [*_rollouts_wait(snapshot), starting]
    busy = _learner_busy(snapshot)
    if busy is not None:
        return [*_rollouts_wait(snapshot), busy, *_scorers(snapshot), *_trouble(snapshot)]
    if EVALUATING in snapshot.learner.phase and not snapshot.buffer.ready:
        return [*_evaluating(snapshot), *_trouble(snapshot)]
    return [*_learner_waits(snapshot), *_trouble(snapshot)]


def _trouble(snapshot: RunSnapshot) -> list[Cause]:
    trouble = snapshot.learner.trouble
    unsaved = [Cause("learner", "unsaved", f"but {trouble}; it is retried every few seconds")] if trouble else []
    return [*unsaved, *_slow_fetches(snapshot)]


def _slow_fetches(snapshot: RunSnapshot) -> list[Cause]:
    links: list[Cause] = []
    for name, replica in snapshot.replicas.items():
        if replica.fetching is None or snapshot.now - replica.at >= MAX_REPORT_AGE_S:
            continue
        since, version = snapshot.now - replica.fetching.since, replica.fetching.version
        if since >= SLOW_FETCH_AFTER_S:
            serves = f"serves version {replica.version}" if replica.version >= 0 else "serves nothing yet"
            text = f"but replica {name} {serves} and has been fetching version {version} for {since:.0f} s from "
            detail = {"replica": name, "version": version, "source": replica.fetching.source}
            text += f"{replica.fetching.source}: the share may hang"
            links.append(Cause("generation", "fetches", text, None, since, detail))
    return links


def _no_learner(snapshot: RunSnapshot, observation: Observation) -> Cause:
    ready = snapshot.buffer.ready + snapshot.buffer.consumed
    if observation.health is Health.ABSENT:
        text = f"no learner trains it ({observation.detail or 'none was started'}), and {ready} complete groups wait for one"
    else:
        text = f"the learner is {observation.health} ({observation.detail}) and is being replaced"
    return Cause("learner", observation.health.value, text, detail={"groups_ready": ready, "log": observation.log})


def _learner_busy(snapshot: RunSnapshot) -> Cause | None:
    """Return the learner's activity, unless it waits for groups."""
    doing = snapshot.learner.doing
    stage, step = doing.get("stage"), doing.get("step", 0)
    clauses = {
        "train": f"the learner trains step {step + 1}",
        "publish": f"the learner publishes version {step} out",
        "checkpoint": f"the learner saves a checkpoint of step {step}",
        "settle": f"the learner waits until its checkpoint of step {step} is on the disk",
        "no_room": f"the learner waits for room on the disk: too much is unsaved to continue after step {step}",
        "resume": "the learner loads its checkpoint",
        "upload": f"the learner waits for the upload of its checkpoint of step {step} (checkpoint_config)",
        "store": "the learner waits for the store of its checkpoints (checkpoint_config.output_dir)",
    }
    if stage == "scoring":
        text = (
            f"the learner waits for {_and(str(doing.get('roles', '')).split(','))} to score group {doing.get('group')}"
        )
        clauses["scoring"] = text
    if stage not in clauses:
        return None
    since = max(snapshot.now - float(doing.get("since", snapshot.now)), 0.0)
    return Cause("learner", str(stage), clauses[stage] + _for(since), None, since, {"step": step})


def _scorers(snapshot: RunSnapshot) -> list[Cause]:
    """Report the services whose scores the learner waits for and that are not ready."""
    doing = snapshot.learner.doing
    names = str(doing.get("roles", "")).split(",") if doing.get("stage") == "scoring" else []
    observed = {name: snapshot.observations[name] for name in names if name in snapshot.observations}
    return [
        _component(snapshot, name, observation)
        for name, observation in observed.items()
        if observation.health is not Health.READY
    ]


def _rollouts_wait(snapshot: RunSnapshot) -> list[Cause]:
    if snapshot.buffer.admission is Admission.STALENESS_BOUND and not _playing(snapshot):
        text = "The env workers wait for the learner: they are as far ahead as max_staleness allows"
        return [Cause("env workers", "waits", text, "learner", detail={"admission": snapshot.buffer.admission.value})]
    return []


def _learner_waits(snapshot: RunSnapshot) -> list[Cause]:
    doing = snapshot.learner.doing
    since = max(snapshot.now - float(doing.get("since", snapshot.now)), 0.0)
    step = int(doing.get("step", snapshot.buffer.step or 0))
    if snapshot.buffer.ready:
        text = f"The learner takes groups for step {step + 1}; {snapshot.buffer.ready} are ready"
        return [Cause("learner", "takes", text, None, since, {"step": step, "ready": snapshot.buffer.ready})]
    group = min(snapshot.groups, key=lambda group: (group.missing, group.number), default=None)
    if group is None:
        return _no_running_group(snapshot, step, since)
    who = f"group {group.number}"
    detail = {"step": step, "groups_needed": doing.get("groups"), "groups_taken": snapshot.buffer.consumed}
    first = Cause("learner", "waits", f"The learner waits for {who}" + _for(since), who, since, detail)
    return [first, *_group(snapshot, group)]


def _no_running_group(snapshot: RunSnapshot, step: int, since: float) -> list[Cause]:
    admission = snapshot.buffer.admission
    reasons = {
        Admission.PAUSED: "no new group may start while the run is paused",
        Admission.NO_WEIGHTS: "no weights are published yet",
        Admission.ALL_ADMITTED: "all groups of the run were admitted",
        Admission.STALENESS_BOUND: "the staleness bound admits none before the next version is published",
    }
    text = f"The learner waits for groups of step {step + 1}" + _for(since)
    if admission in reasons:
        first = Cause("learner", "waits", text, "admission", since)
        return [first, Cause("admission", admission.value, f"no group is running: {reasons[admission]}")]
    return [Cause("learner", "waits", text, "env workers", since), _workers(snapshot, "no group is running yet: ")]


def _workers(snapshot: RunSnapshot, opening: str) -> Cause:
    alive = snapshot.buffer.workers
    if not alive:
        observation = snapshot.observations.get("env-workers")
        how = f" ({observation.health}{f', {observation.detail}' if observation.detail else ''})" if observation else ""
        return Cause("env workers", "absent", f"{opening}no env worker is there{how}")
    playing = sum(worker.episodes for worker in alive)
    text = f"{opening}{len(alive)} env worker(s) run {playing} episodes and claim more as slots become free"
    return Cause("env workers", "busy", text, detail={"workers": len(alive)})


def _group(snapshot: RunSnapshot, group: GroupProgress) -> list[Cause]:
    still = min(group.missing, group.played + group.queued)
    waits = _waits(snapshot.workers.values(), "groups", str(group.number), snapshot.now)
    if not group.played:
        text = f"{group.missing} of its {group.size} episodes are not claimed yet"
        first = Cause(f"group {group.number}", "queued", text, "env workers", detail=_progress(group))
        return [first, _workers(snapshot, "")]
    text = f"{still} of its {group.size} episodes {'is' if still == 1 else 'are'} still running"
    longest = _longest(waits)
    first = Cause(f"group {group.number}", "playing", text, "episodes", detail=_progress(group))
    return [first, *_episodes(snapshot, waits, longest, still)]


def _episodes(
    snapshot: RunSnapshot, waits: Mapping[str, tuple[int, float]], longest: str | None, still: int
) -> list[Cause]:
    if longest is None:
        silent = [worker for worker in snapshot.buffer.workers if worker.silent_s > MAX_REPORT_AGE_S]
        about = (
            f"their env worker has been silent for {max(worker.silent_s for worker in silent):.0f} s" if silent else ""
        )
        return [Cause("episodes", "unknown", about or "their env workers have not reported yet what they wait for")]
    count, since = waits[longest]
    they = "it waits" if still == 1 else "they wait" if count >= still else f"{count} of them wait{'s' * (count == 1)}"
    detail: dict[str, Any] = {wait: number for wait, (number, _) in waits.items()}
    match longest:
        case "generation":
            first = Cause("episodes", "waits", f"{they} for generation", "generation", snapshot.now - since, detail)
            return [first, _generation(snapshot)]
        case "env":
            text = f"{they} for {'its' if still == 1 else 'their'} env to answer" + _for(snapshot.now - since)
            return [Cause("episodes", "waits", text, "env", snapshot.now - since, detail)]
        case "agent":
            text = f"{they} for {'its' if still == 1 else 'their'} agent to continue" + _for(snapshot.now - since)
            return [Cause("episodes", "waits", text, "agent", snapshot.now - since, detail)]
        case "place":
            return [Cause("episodes", "waits", f"{they} for an env of the pool", "env", snapshot.now - since, detail)]
        case _:
            text = "it is being handed in" if still == 1 else "they are being handed in"
            return [Cause("episodes", "waits", text, "buffer", snapshot.now - since, detail)]


def _generation(snapshot: RunSnapshot) -> Cause:
    replicas = {
        name: replica for name, replica in snapshot.replicas.items() if snapshot.now - replica.at < MAX_REPORT_AGE_S
    }
    detail = {"replicas": len(replicas), "newest_version": snapshot.version}
    if not replicas:
        observation = snapshot.observations.get("generation")
        how = f" ({observation.health}{f', {observation.detail}' if observation.detail else ''})" if observation else ""
        return Cause("generation", "absent", f"no replica of which answers{how}", detail=detail)
    whose = "whose replica is" if len(replicas) == 1 else f"of whose {len(replicas)} replicas one is"
    for replica in replicas.values():
        if replica.load.loading is not None:
            since = snapshot.now - replica.load.loading_since
            text = f"{whose} loading version {replica.load.loading} since {since:.1f} s"
            return Cause("generation", "loads", text, None, since, {**detail, "version": replica.load.loading})
    behind = [replica for replica in replicas.values() if replica.load.waiting and replica.version < snapshot.version]
    if behind:
        text = f"which serves version {behind[0].version} and fetches version {snapshot.version}"
        return Cause("generation", "fetches", text, detail=detail)
    running = sum(replica.load.running for replica in replicas.values())
    text = f"which samples {running} request(s) under version {max(replica.version for replica in replicas.values())}"
    return Cause("generation", "samples", text, detail={**detail, "requests": running})


def _evaluating(snapshot: RunSnapshot) -> list[Cause]:
    units = {name for report in snapshot.workers.values() for name in report.get("evaluations", {})}
    text = f"The learner waits for an evaluation ({snapshot.learner.phase})"
    first = Cause("learner", "waits", text, "evaluation")
    waits: dict[str, tuple[int, float]] = {}
    for unit in units:
        waits = _merged(waits, _waits(snapshot.workers.values(), "evaluations", unit, snapshot.now))
    if not waits:
        workers = _workers(snapshot, "")
        text = f"{snapshot.buffer.queued_eval} of its episodes are not claimed yet"
        return [first, Cause("evaluation", "queued", text, workers.component), workers]
    playing = sum(number for number, _ in waits.values())
    text = f"{playing} of its episodes are playing and {snapshot.buffer.queued_eval} are queued"
    second = Cause("evaluation", "playing", text, "episodes", detail={"queued": snapshot.buffer.queued_eval})
    return [first, second, *_episodes(snapshot, waits, _longest(waits), playing)]


def _waits(reports: Iterable[Mapping[str, Any]], kind: str, unit: str, now: float) -> dict[str, tuple[int, float]]:
    """Return wait -> (number of episodes, start of the longest), from recent reports."""
    waits: dict[str, tuple[int, float]] = {}
    for report in reports:
        if now - float(report.get("at", 0.0)) < MAX_REPORT_AGE_S:
            entries = report.get(kind, {}).get(unit, {})
            waits = _merged(waits, {wait: (int(number), float(since)) for wait, (number, since) in entries.items()})
    return waits


def _merged(
    one: Mapping[str, tuple[int, float]], other: Mapping[str, tuple[int, float]]
) -> dict[str, tuple[int, float]]:
    out = dict(one)
    for wait, (number, since) in other.items():
        before = out.get(wait, (0, since))
        out[wait] = (before[0] + number, min(before[1], since))
    return out


def _longest(waits: Mapping[str, tuple[int, float]]) -> str | None:
    return min(waits, key=lambda wait: waits[wait][1], default=None)


def _playing(snapshot: RunSnapshot) -> int:
    return sum(worker.episodes for worker in snapshot.buffer.workers)


def _progress(group: GroupProgress) -> dict[str, Any]:
    return {"done": group.done, "size": group.size, "played": group.played, "queued": group.queued}


def _for(seconds: float) -> str:
    return f" since {seconds:.1f} s" if seconds >= MIN_REPORTED_WAIT_S else ""


def _the(name: str) -> str:
    return f"the {name.replace('-', ' ')}" if name == "learner" else name.replace("-", " ")


def _listed(names: Sequence[str]) -> str:
    return _and([_the(name) for name in names]) or "no component"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
