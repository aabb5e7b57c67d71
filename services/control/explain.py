"""Explanation of a run's wait: a chain of reports from the learner to the busy component."""

from collections.abc import Sequence
from typing import Any

from offbeat.services.buffer.api import Admission, GroupProgress
from offbeat.services.control.causes import (
    MAX_REPORT_AGE_S,
    Cause,
    RunSnapshot,
    for_seconds,
    join_components,
    join_names,
    spoken_name,
)
from offbeat.services.control.explain_episodes import (
    count_waits,
    explain_computing,
    explain_episodes,
    explain_evaluation,
    explain_workers,
    longest_wait,
)
from offbeat.services.control.explain_load import explain_preemptions
from offbeat.services.control.failed_groups import advise_failed
from offbeat.services.control.failing_episodes import read_failing
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import RunState

UNATTENDED_AFTER_S = 15.0
"""Age of the last reconciliation."""
SLOW_FETCH_AFTER_S = 30.0
EVALUATING = "evaluating"


def chain(snapshot: RunSnapshot) -> list[Cause]:
    """Return the chain, waiting component first; never empty."""
    return [
        *_refused(snapshot),
        *_chain(snapshot),
        *_failing(snapshot),
        *_failed(snapshot),
        *explain_preemptions(snapshot),
        *(Cause("training", finding.name, f"diagnosis: {finding}") for finding in snapshot.learner.findings),
        *_unattended(snapshot),
    ]


def _failing(snapshot: RunSnapshot) -> list[Cause]:
    """Report episodes that often fail: only passing ones are trained."""
    if snapshot.record.state.is_terminal:
        return []
    return [
        Cause(
            "episodes" if each.what == "episodes" else "rewards",
            "fail",
            each.describe_many(),
            detail={"failed": each.recent_failed, "of": each.recent, "trace": each.trace},
        )
        for each in read_failing(snapshot.workers.values(), since=snapshot.record.started_at)
        if each.many_fail
    ]


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
    reasons = "the control service hangs, is being replaced, or can't read the run's configuration, as its log says"
    text = f"and the run has not been reconciled for {silent_s:.0f} s: {reasons}"
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
    names = join_components(sorted(missing))
    links = [Cause("run", "waits", f"The run starts and waits for {names}", next(iter(missing)))]
    links += [_component(snapshot, name, observation) for name, observation in missing.items()]
    return [*links, *_slow_fetches(snapshot)]


def _component(snapshot: RunSnapshot, name: str, observation: Observation) -> Cause:
    detail = snapshot.learner.phase if name == "learner" and observation.health is Health.STARTING else ""
    detail = detail or observation.detail
    clause = f"{spoken_name(name)} is {observation.health}" + (f" ({detail})" if detail else "")
    return Cause(name, observation.health.value, clause, detail={"detail": detail, "log": observation.log})


def _draining(snapshot: RunSnapshot) -> list[Cause]:
    remaining = [
        name
        for name, observation in snapshot.observations.items()
        if observation.health in (Health.READY, Health.STARTING)
    ]
    since = snapshot.now - snapshot.record.draining_at
    first = Cause(
        "run", "draining", f"The run ends since {since:.1f} s and waits for {join_components(remaining)}", None, since
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
        return [*explain_evaluation(snapshot), *_trouble(snapshot)]
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
    doing = snapshot.learner.doing
    stage, step = doing.get("stage"), doing.get("step", 0)
    clauses = {
        "train": f"the learner trains step {step + 1}",
        "publish": f"the learner publishes version {step} out",
        "checkpoint": f"the learner saves a checkpoint of step {step}",
        "ending": "the learner ends",
        "settle": f"the learner waits until its checkpoint of step {step} is on the disk",
        "no_room": f"the learner waits for room on the disk: too much is unsaved to continue after step {step}",
        "resume": "the learner loads its checkpoint",
        "turn": "the learner waits until the engines on its devices sleep",
        "upload": f"the learner waits for the upload of its checkpoint of step {step} (checkpoint_config)",
        "store": "the learner waits for the store of its checkpoints (checkpoint_config.output_dir)",
    }
    if stage == "scoring":
        roles = join_names(str(doing.get("roles", "")).split(","))
        clauses[stage] = f"the learner waits for {roles} to score group {doing.get('group')}"
    if stage not in clauses:
        return None
    since = max(snapshot.now - float(doing.get("since", snapshot.now)), 0.0)
    return Cause("learner", str(stage), clauses[stage] + for_seconds(since), None, since, {"step": step})


def _scorers(snapshot: RunSnapshot) -> list[Cause]:
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
    group = snapshot.awaited_group
    if group is None:
        return _no_running_group(snapshot, step, since)
    who = f"group {group.number}"
    detail = {"step": step, "groups_needed": doing.get("groups"), "groups_taken": snapshot.buffer.consumed}
    first = Cause("learner", "waits", f"The learner waits for {who}" + for_seconds(since), who, since, detail)
    return [first, *_group(snapshot, group)]


def _no_running_group(snapshot: RunSnapshot, step: int, since: float) -> list[Cause]:
    admission = snapshot.buffer.admission
    reasons = {
        Admission.PAUSED: "no new group may start while the run is paused",
        Admission.NO_WEIGHTS: "no weights are published yet",
        Admission.LEDGER_BEHIND: "the run's folder lacks the newest events of groups, which the learner copies there",
        Admission.ALL_ADMITTED: "all groups of the run were admitted",
        Admission.STALENESS_BOUND: "the staleness bound admits none before the next version is published",
    }
    text = f"The learner waits for groups of step {step + 1}" + for_seconds(since)
    if admission in reasons:
        first = Cause("learner", "waits", text, "admission", since)
        return [first, Cause("admission", admission.value, f"no group is running: {reasons[admission]}")]
    return [
        Cause("learner", "waits", text, "env workers", since),
        explain_workers(snapshot, "no group is running yet: "),
    ]


def _group(snapshot: RunSnapshot, group: GroupProgress) -> list[Cause]:
    still = min(group.missing, group.played + group.queued)
    waits = count_waits(snapshot.workers.values(), "groups", str(group.number), snapshot.now)
    if group.is_scoring:
        return _group_rewards(snapshot, group, waits.get("reward"))
    if not group.played:
        text = f"{group.missing} of its {group.size} episodes are not claimed yet"
        first = Cause(f"group {group.number}", "queued", text, "env workers", detail=_progress(group))
        return [first, explain_workers(snapshot, "")]
    text = f"{still} of its {group.size} episodes {'is' if still == 1 else 'are'} still running"
    longest = longest_wait(waits)
    first = Cause(f"group {group.number}", "playing", text, "episodes", detail=_progress(group))
    return [first, *explain_episodes(snapshot, waits, longest, still), *explain_computing(snapshot)]


def _group_rewards(snapshot: RunSnapshot, group: GroupProgress, wait: tuple[int, float] | None) -> list[Cause]:
    who = f"group {group.number}"
    text = f"all {group.size} of its episodes are there, and not yet the rewards that compare them"
    if wait is None:  # no worker that reports has claimed them
        first = Cause(who, "scoring", text, "env workers", detail=_progress(group))
        return [first, explain_workers(snapshot, "")]
    waited_s = snapshot.now - wait[1]
    return [Cause(who, "scoring", text + for_seconds(waited_s), "rewards", waited_s, _progress(group))]


def _progress(group: GroupProgress) -> dict[str, Any]:
    return {"done": group.done, "size": group.size, "played": group.played, "queued": group.queued}


def _playing(snapshot: RunSnapshot) -> int:
    return sum(worker.episodes for worker in snapshot.buffer.workers)
