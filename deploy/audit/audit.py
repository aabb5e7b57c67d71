"""Proof that no group was lost or trained twice.

Sources: the ledgers of buffer (`ledger/groups.jsonl`) and learner (`ledger/steps.jsonl`), checkpoints and counters.
Invariant: violations name their group, step or file.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from offbeat.deploy.audit.lineage import Lineage, trace
from offbeat.services.buffer.api import Counters
from offbeat.services.buffer.group_ledger import UNNUMBERED, LifeEvent
from offbeat.trainer.learner.step_ledger import JournalLine

TRAINED, DROPPED, FAILED = "trained", "dropped", "failed"
OUTCOMES = (TRAINED, DROPPED, FAILED)
REWOUND = "rewound"
RESTORED, RECONCILED = "restored", "reconciled"
"""Reconciliation events after which Redis again knows what the journal proves."""
SHOWN = 8


@dataclass
class GroupLife:
    number: int
    admitted_version: int
    submitted: bool = False
    ending: str = ""
    """One of `OUTCOMES`; empty while in flight."""
    detail: str = ""
    """trained: its checkpoint's step; otherwise the reason."""
    step: int | None = None
    """Batch in the surviving lineage."""
    oldest_version: int | None = None

    @property
    def state(self) -> str:
        return self.ending or ("in the stream" if self.submitted else "being played")


@dataclass(frozen=True, slots=True)
class Evidence:
    events: Sequence[LifeEvent]
    journal: Sequence[JournalLine]
    checkpoints: dict[int, str] = field(default_factory=dict[int, str])
    """Step -> problem, or empty."""
    counters: Counters | None = None
    """Of the Redis with the newest events."""
    groups_per_step: int = 1
    max_steps: int = 0
    train_stale: bool = False
    """`buffer.stale_policy: train`."""
    broken_lines: int = 0


@dataclass
class Audit:
    groups: dict[int, GroupLife]
    lineage: Lineage
    findings: list[str] = field(default_factory=list[str])
    """Violations."""
    notes: list[str] = field(default_factory=list[str])
    num_restored: int = 0
    """Groups that a reconciliation counted as trained again."""

    @property
    def proven(self) -> bool:
        return not self.findings

    def count(self, ending: str) -> int:
        return sum(life.ending == ending for life in self.groups.values())

    def reasons(self, ending: str) -> dict[str, int]:
        """Return groups per reason, most frequent first."""
        return dict(Counter(life.detail for life in self.groups.values() if life.ending == ending).most_common())

    @property
    def staleness(self) -> dict[int, int]:
        """Lag at consumption -> groups of the surviving lineage."""
        lags = (line.step - 1 - each.oldest_version for line in self.lineage.steps for each in line.groups)
        return dict(sorted(Counter(lags).items()))


def audit(evidence: Evidence) -> Audit:
    lineage = trace(evidence.journal)
    result = Audit({}, lineage, list(lineage.findings), list(lineage.notes))
    surviving = _surviving_events(evidence.events, result)
    _replay_lives(surviving, result)
    _merge_lineage(result)
    if result.num_restored:
        result.notes.append(f"{result.num_restored} groups were counted as trained again, as Redis had forgotten them")
    result.findings += _check_numbers(result)
    result.findings += _check_steps(evidence, result)
    result.findings += _check_acknowledgements(evidence, result)
    result.findings += _check_counters(evidence, result)
    result.findings += _end(evidence, result)
    if evidence.broken_lines:
        result.notes.append(
            f"{evidence.broken_lines} cut lines in ledger/, of a disk that was full or a process that died"
        )
    return result


def _surviving_events(events: Sequence[LifeEvent], result: Audit) -> list[LifeEvent]:
    """Return events not undone by Redis' data loss."""
    surviving: list[LifeEvent] = []
    counted = [event for event in events if event.ordinal != UNNUMBERED]
    if old := len(events) - len(counted):
        result.notes.append(f"{old} events of an older version of Offbeat are not numbered and were ignored")
    for event in counted:
        last = surviving[-1].ordinal if surviving else 0
        if event.ordinal > last + 1:
            missing = f"event {last + 1}" if event.ordinal == last + 2 else f"events {last + 1} to {event.ordinal - 1}"
            result.findings.append(f"ledger/groups.jsonl: {missing} before {event.id} are missing")
        elif event.ordinal <= last:
            earlier = [each for each in surviving if each.ordinal < event.ordinal]
            result.notes.append(
                f"Redis came back without its newest {len(surviving) - len(earlier)} events (at {event.id})"
            )
            surviving = earlier
        surviving.append(event)
    return surviving


def _replay_lives(events: Iterable[LifeEvent], result: Audit) -> None:
    for event in events:
        if event.event in (RESTORED, RECONCILED):
            _restore_lives(event, result)
            continue
        life = result.groups.get(event.number)
        if event.event == "admitted":
            if life is not None:
                result.findings.append(f"group {event.number} was admitted twice (again at {event.id})")
            result.groups[event.number] = GroupLife(event.number, int(event.detail))
            continue
        if life is None:
            result.findings.append(f"group {event.number} was {event.event} at {event.id}, though never admitted")
            life = result.groups[event.number] = GroupLife(event.number, 0)
        if life.ending:
            result.findings.append(
                f"group {event.number} was {event.event} at {event.id} after it had been {life.ending} ({life.detail})"
            )
        elif event.event == "submitted":
            if life.submitted:
                result.findings.append(f"group {event.number} entered the stream twice (again at {event.id})")
            life.submitted = True
        else:
            if event.event == TRAINED and not life.submitted:
                result.findings.append(f"group {event.number} was trained, though it never entered the stream")
            life.ending, life.detail = event.event, event.detail


def _restore_lives(event: LifeEvent, result: Audit) -> None:
    """Count as trained what Redis had forgotten."""
    if event.event == RECONCILED:
        return
    step, _, numbers = event.detail.partition(":")
    for number in map(int, numbers.split(",")):
        life = result.groups.setdefault(number, GroupLife(number, 0))
        if life.ending:
            result.findings.append(
                f"group {number} was restored at {event.id} after it had been {life.ending} ({life.detail})"
            )
        life.submitted, life.ending, life.detail = True, TRAINED, step
    result.num_restored += numbers.count(",") + 1


def _merge_lineage(result: Audit) -> None:
    """Add each group's step, and corrections after data loss."""
    for step, groups in result.lineage.rewound.items():
        for number in groups:
            life = result.groups.get(number)
            if life is not None and life.ending == TRAINED and int(life.detail) >= step:
                life.ending, life.detail = DROPPED, REWOUND
    for line in result.lineage.steps:
        for each in line.groups:
            life = result.groups.get(each.number)
            if life is None and line.step <= result.lineage.restored_to:
                life = result.groups[each.number] = GroupLife(
                    each.number, each.oldest_version, True, TRAINED, str(line.step)
                )
            if life is not None:
                life.step, life.oldest_version = line.step, each.oldest_version
                if not life.ending and line.step <= result.lineage.restored_to:
                    life.submitted, life.ending, life.detail = True, TRAINED, str(line.step)
    rewound_to = result.lineage.rewound_to
    if rewound_to is not None:
        result.notes.append(f"checkpoints after step {rewound_to} were gone: their groups are dropped as {REWOUND}")
        for life in result.groups.values():
            if life.ending == TRAINED and life.step is not None and life.step <= rewound_to < int(life.detail):
                life.detail = str(rewound_to)
    if result.lineage.restored_to:
        result.notes.append(
            f"Redis had lost its data: the groups of the steps up to {result.lineage.restored_to} are counted by the journal"
        )


def _check_numbers(result: Audit) -> Iterator[str]:
    if not result.groups or result.lineage.restored_to or result.lineage.first > 1:
        return
    missing = [number for number in range(max(result.groups)) if number not in result.groups]
    if missing:
        yield f"{name_numbers('group', missing)} never admitted, though group {max(result.groups)} was"


def _check_steps(evidence: Evidence, result: Audit) -> Iterator[str]:
    trained_at: dict[int, int] = {}
    for line in result.lineage.steps:
        if len(line.groups) != evidence.groups_per_step:
            yield f"step {line.step} consumed {len(line.groups)} groups instead of {evidence.groups_per_step}"
        for each in line.groups:
            if each.number in trained_at:
                yield f"group {each.number} was trained twice: at step {trained_at[each.number]} and at step {line.step}"
            trained_at[each.number] = line.step
            lag = line.step - 1 - each.oldest_version
            if each.oldest_version > max(line.step - 1, result.lineage.newest_version.get(line.step, 0)):
                yield f"group {each.number} of step {line.step} holds tokens of the later version {each.oldest_version}"
            if lag > math.ceil(line.max_staleness) and not evidence.train_stale:
                bound = f"{line.max_staleness:g}"
                yield f"group {each.number} was trained at step {line.step} with a lag of {lag}, above {bound}"
            life = result.groups.get(each.number)
            if life is None:
                yield f"group {each.number} of step {line.step} is not in the buffer's ledger"
            elif life.ending in (DROPPED, FAILED):
                yield f"group {each.number} was trained at step {line.step}, and {life.ending} ({life.detail})"


def _check_acknowledgements(evidence: Evidence, result: Audit) -> Iterator[str]:
    """Check that groups left only with a durable checkpoint."""
    trained = [life for life in result.groups.values() if life.ending == TRAINED]
    newest = max((int(life.detail) for life in trained), default=0)
    if result.lineage.first == 1:
        orphans = [life.number for life in trained if life.step is None]
        if orphans:
            yield f"{name_numbers('group', orphans)} acknowledged as trained, but in no step of the surviving lineage"
    for life in trained:
        if life.step is not None and life.step > int(life.detail):
            yield f"group {life.number} of step {life.step} was acknowledged by the checkpoint of step {life.detail} before"
    acked_early = [
        life.number for life in result.groups.values() if not life.ending and life.step and life.step <= newest
    ]
    if acked_early:
        yield f"{name_numbers('group', acked_early)} trained by step {newest}, but missing in its acknowledged checkpoint"
    complete = [step for step, complaint in evidence.checkpoints.items() if not complaint]
    for step, complaint in sorted(evidence.checkpoints.items()):
        if complaint:
            yield f"checkpoints/step-{step:06d} can't be used: {complaint}"
    if newest > max(complete, default=0):
        there = (
            f"the newest whole checkpoint is of step {max(complete)}" if complete else "there is no whole checkpoint"
        )
        yield f"groups were acknowledged for step {newest}, but {there}"


def _check_counters(evidence: Evidence, result: Audit) -> Iterator[str]:
    counters = evidence.counters
    if counters is None:
        return
    elsewhere = (result.lineage.first - 1) * evidence.groups_per_step
    pairs = {
        "admitted": (counters.admitted, len(result.groups) + elsewhere),
        TRAINED: (counters.trained, result.count(TRAINED) + elsewhere),
        DROPPED: (sum(counters.dropped.values()), result.count(DROPPED)),
        FAILED: (sum(counters.failed.values()), result.count(FAILED)),
    }
    for name, (counted, listed) in pairs.items():
        if counted != listed:
            yield f"Redis counts {counted} groups as {name}, the ledger lists {listed}"


def _end(evidence: Evidence, result: Audit) -> Iterator[str]:
    if not evidence.max_steps or result.lineage.last < evidence.max_steps:
        return
    complete = [step for step, complaint in evidence.checkpoints.items() if not complaint]
    if max(complete, default=0) < evidence.max_steps:
        return
    open_ones = [life.number for life in result.groups.values() if not life.ending]
    if open_ones:
        groups = name_numbers("group", open_ones, past=False)
        yield f"all {evidence.max_steps} steps are trained and saved, but {groups} still open"


def name_numbers(what: str, numbers: Sequence[int], *, past: bool = True) -> str:
    """Return `group 3 was`, or `groups 3, 4, 5 and 17 more were`."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    verb = ("was" if len(numbers) == 1 else "were") if past else ("is" if len(numbers) == 1 else "are")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more} {verb}"
