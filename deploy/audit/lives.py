"""Lives of a run's groups, from the ledgers of buffer and learner."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from offbeat.deploy.audit.lineage import Lineage, trace
from offbeat.services.buffer.group_ledger import UNNUMBERED, LifeEvent
from offbeat.trainer.learner.step_ledger import JournalLine, StepLine

TRAINED, DROPPED, FAILED = "trained", "dropped", "failed"
OUTCOMES = (TRAINED, DROPPED, FAILED)
REWOUND = "rewound"
RESTORED, RECONCILED = "restored", "reconciled"
"""Events after which Redis again knows what the journal proves."""


@dataclass(slots=True)
class GroupLife:
    number: int
    admitted_version: int
    submitted: bool = False
    ending: str = ""
    """One of `OUTCOMES`; empty while in flight."""
    detail: str = ""
    """trained: its checkpoint's step; else the reason."""
    step: int | None = None
    """Batch in the surviving lineage."""
    oldest_version: int | None = None
    admitted_at: float = 0.0
    """Unix time, like the following; 0 if unknown."""
    submitted_at: float = 0.0
    """Last member's."""
    trained_at: float = 0.0
    """End of its optimizer step."""
    ended_at: float = 0.0
    """Left the buffer."""
    computed: bool = True
    """False if only counted in denominators."""
    tag: str = ""
    rewards: tuple[float, ...] = ()
    """Of its trajectories, once trained."""
    num_sampled: int = 0
    """Tokens."""

    @property
    def state(self) -> str:
        return self.ending or ("in the stream" if self.submitted else "being played")


@dataclass
class Audit:
    groups: dict[int, GroupLife]
    lineage: Lineage
    findings: list[str] = field(default_factory=list[str])
    """Violations."""
    notes: list[str] = field(default_factory=list[str])
    num_restored: int = 0
    """Counted as trained again by a reconciliation."""

    @property
    def proven(self) -> bool:
        return not self.findings

    def count(self, ending: str) -> int:
        return sum(life.ending == ending for life in self.groups.values())

    def reasons(self, ending: str) -> dict[str, int]:
        """Return groups by reason, most frequent first."""
        return dict(Counter(life.detail for life in self.groups.values() if life.ending == ending).most_common())

    @property
    def staleness(self) -> dict[int, int]:
        """Return groups of the surviving lineage by lag at consumption."""
        lags = (line.step - 1 - each.oldest_version for line in self.lineage.steps for each in line.groups)
        return dict(sorted(Counter(lags).items()))


def replay(events: Sequence[LifeEvent], journal: Sequence[JournalLine]) -> Audit:
    """Return the groups' lives and contradictions."""
    lineage = trace(journal)
    result = Audit({}, lineage, list(lineage.findings), list(lineage.notes))
    replay_events(_surviving_events(events, result), result)
    _merge_lineage(result)
    return result


def _surviving_events(events: Sequence[LifeEvent], result: Audit) -> list[LifeEvent]:
    """Return events that survived losses in Redis."""
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


def replay_events(events: Iterable[LifeEvent], result: Audit) -> None:
    for event in events:
        if event.event in (RESTORED, RECONCILED):
            _restore_lives(event, result)
            continue
        life = result.groups.get(event.number)
        if event.event == "admitted":
            if life is not None:
                result.findings.append(f"group {event.number} was admitted twice (again at {event.id})")
            result.groups[event.number] = GroupLife(event.number, int(event.detail), admitted_at=event.at)
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
            life.submitted, life.submitted_at = True, event.at
        else:
            if event.event == TRAINED and not life.submitted:
                result.findings.append(f"group {event.number} was trained, though it never entered the stream")
            life.ending, life.detail, life.ended_at = event.event, event.detail, event.at


def _restore_lives(event: LifeEvent, result: Audit) -> None:
    """Count forgotten groups as trained."""
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
        merge_step(line, result)
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


def merge_step(line: StepLine, result: Audit) -> None:
    for each in line.groups:
        life = result.groups.get(each.number)
        if life is None and line.step <= result.lineage.restored_to:
            life = result.groups[each.number] = GroupLife(
                each.number, each.oldest_version, True, TRAINED, str(line.step)
            )
        if life is not None:
            life.step, life.oldest_version, life.trained_at = line.step, each.oldest_version, line.at
            life.computed, life.tag = each.computed, each.tag
            life.rewards, life.num_sampled = each.rewards, each.num_sampled
            if not life.ending and line.step <= result.lineage.restored_to:
                life.submitted, life.ending, life.detail = True, TRAINED, str(line.step)
