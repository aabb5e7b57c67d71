"""Lives of an active run's newest groups."""

from collections.abc import Mapping, Sequence
from itertools import chain

from offbeat.deploy.audit.lives import RECONCILED, RESTORED, Audit, GroupLife, merge_step, replay, replay_events
from offbeat.services.buffer.group_ledger import UNNUMBERED, LifeEvent
from offbeat.trainer.learner.step_ledger import JournalLine, ResumedLine, StepLine

KEPT_GROUPS = 50_000
"""Newest groups; ended ones before them are forgotten, each time a quarter of that number has been admitted."""


class LiveReplay:
    """`replay` of what was added so far.

    Invariants: events and steps that continue the earlier ones are applied alone; anything else replays everything that
    is kept. Memory is that of the groups in flight and of `KEPT_GROUPS`.
    """

    def __init__(self, num_kept: int = KEPT_GROUPS) -> None:
        self._num_kept = num_kept
        self.first_number = 0
        """Groups before it are left out, except those in flight."""
        self._num_in_flight = 0
        """Groups before `first_number` that were in flight when groups were last forgotten."""
        self._base: ResumedLine | None = None
        """Stands for the forgotten steps."""
        self._events: dict[str, LifeEvent] = {}
        self._lines: list[JournalLine] = []
        self._audit: Audit | None = None
        self._last_event: LifeEvent | None = None
        self._is_complete = False
        """Whether every step's groups are known."""
        self._corrected: set[int] = set()
        """Groups whose lives depend on all of their events: of steps up to `_corrected_to`, and of undone ones."""
        self._corrected_to = 0
        """Step of a loss in Redis or a rewind."""

    @property
    def lives(self) -> dict[int, GroupLife]:
        """Return lives by number; empty before `add`."""
        return {} if self._audit is None else self._audit.groups

    def clear_events(self) -> None:
        self._events, self._audit, self.first_number, self._num_in_flight = {}, None, 0, 0

    def clear_lines(self) -> None:
        self._lines, self._audit, self._base = [], None, None

    def leave_out_earlier(self, events: Sequence[LifeEvent]) -> None:
        """Leave out the groups that were admitted before the first of `events`, as these begin inside a ledger."""
        admitted = (event.number for event in events if event.event == "admitted")
        self.first_number = max(self.first_number, next(admitted, 0))

    def add(self, events: Sequence[LifeEvent], lines: Sequence[JournalLine]) -> None:
        new = [event for event in events if event.id not in self._events]
        lines = self._follow_base(lines)
        self._apply(new, lines)
        if len(self.lives) - self._num_in_flight > self._num_kept * 5 // 4:
            self._forget()

    def _apply(self, new: Sequence[LifeEvent], lines: Sequence[JournalLine]) -> None:
        self._events |= {event.id: event for event in new}
        self._lines += lines
        if self._audit is not None and not new and not lines:
            return
        if self._audit is not None and self._continues(self._audit, new, lines):
            replay_events([event for event in new if self._is_known(event.number, self._audit)], self._audit)
            for line in lines:
                assert isinstance(line, StepLine)
                self._audit.lineage.steps.append(line)
                merge_step(line, self._audit)
            self._last_event = new[-1] if new else self._last_event
        else:
            self._replay_all()

    def _replay_all(self) -> None:
        ordered = sorted(self._events.values(), key=lambda event: event.sort_key)
        self._audit = replay(ordered, self._lines)
        self._last_event = ordered[-1] if ordered else None
        admitted = {event.number for event in ordered if event.event == "admitted"}
        for number in [each for each in self._audit.groups if each < self.first_number and each not in admitted]:
            del self._audit.groups[number]
        lineage, steps = self._audit.lineage, self._audit.lineage.steps
        self._corrected_to = max(lineage.restored_to, lineage.rewound_to or 0)
        self._corrected = {each.number for line in steps if line.step <= self._corrected_to for each in line.groups}
        self._corrected.update(*lineage.rewound.values())
        self._is_complete = all(
            each.number in self._audit.groups or each.number < self.first_number
            for line in steps
            for each in line.groups
        )

    def _is_known(self, number: int, audit: Audit) -> bool:
        return number >= self.first_number or number in audit.groups

    def _follow_base(self, lines: Sequence[JournalLine]) -> list[JournalLine]:
        """Return the lines, which may begin inside a ledger, or return to steps that are forgotten."""
        followed: list[JournalLine] = []
        for line in lines:
            is_placed = any(isinstance(each, StepLine | ResumedLine) for each in chain(self._lines, followed))
            if isinstance(line, StepLine) and not is_placed:
                self._base = ResumedLine(line.step - 1, line.epoch, 0)
                followed.append(self._base)
            elif isinstance(line, ResumedLine) and self._base is not None and line.step < self._base.step:
                followed.append(ResumedLine(self._base.step, line.epoch, line.restored, line.incarnation))
                self._base = line
            followed.append(line)
        return followed

    def _forget(self) -> None:
        """Forget the oldest groups that have ended, with their events and steps."""
        assert self._audit is not None
        groups, lineage = self._audit.groups, self._audit.lineage
        self.first_number = max(groups) - self._num_kept + 1
        gone = [number for number, life in groups.items() if number < self.first_number and life.ending]
        for number in gone:
            del groups[number]
        self._num_in_flight = sum(number < self.first_number for number in groups)
        self._events = {event.id: event for event in self._events.values() if self._concerns(event, groups)}
        steps = (i for i, line in enumerate(self._lines) if isinstance(line, StepLine))
        first = next((i for i in steps if self._is_kept(self._lines[i], groups)), None)
        line = None if first is None else self._lines[first]
        if isinstance(line, StepLine) and line in lineage.steps[line.step - lineage.first :][:1]:
            others = [each for each in self._lines[:first] if not isinstance(each, StepLine) and each is not self._base]
            self._base = ResumedLine(line.step - 1, line.epoch, 0)
            self._lines = [*others, self._base, *self._lines[first:]]
            lineage.steps, lineage.first = lineage.steps[line.step - lineage.first :], line.step

    def _is_kept(self, line: JournalLine, groups: Mapping[int, GroupLife]) -> bool:
        return isinstance(line, StepLine) and any(each.number in groups for each in line.groups)

    def _concerns(self, event: LifeEvent, groups: Mapping[int, GroupLife]) -> bool:
        if event.event == RESTORED:
            return any(int(number) in groups for number in event.detail.partition(":")[2].split(","))
        return event.event == RECONCILED or event.number in groups

    def _continues(self, audit: Audit, events: Sequence[LifeEvent], lines: Sequence[JournalLine]) -> bool:
        lineage, last = audit.lineage, self._last_event
        if last is None or not self._is_complete:
            return False
        for event in events:
            is_next = event.ordinal == last.ordinal + 1 and event.sort_key > last.sort_key
            if not is_next or last.ordinal == UNNUMBERED or event.event in (RESTORED, RECONCILED):
                return False
            last = event
        numbers = {event.number for event in events}
        epoch = self._lines[-len(lines) - 1].epoch if len(self._lines) > len(lines) else 0
        steps = [line for line in lines if isinstance(line, StepLine) and line.epoch == epoch]
        if self._corrected & (numbers | {each.number for line in steps for each in line.groups}):
            return False
        return (
            len(steps) == len(lines)
            and (not steps or lineage.last >= self._corrected_to)
            and [line.step for line in steps] == list(range(lineage.last + 1, lineage.last + 1 + len(steps)))
            and all(
                each.number in audit.groups or each.number in numbers or each.number < self.first_number
                for line in steps
                for each in line.groups
            )
        )
