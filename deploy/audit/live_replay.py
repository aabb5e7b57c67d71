"""Lives of an active run's groups."""

from collections.abc import Sequence

from offbeat.deploy.audit.lives import RECONCILED, RESTORED, Audit, GroupLife, merge_step, replay, replay_events
from offbeat.services.buffer.group_ledger import UNNUMBERED, LifeEvent
from offbeat.trainer.learner.step_ledger import JournalLine, StepLine


class LiveReplay:
    """`replay` of what was added so far.

    Invariant: events and steps that continue the earlier ones are applied alone; anything else replays everything.
    """

    def __init__(self) -> None:
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
        self._events, self._audit = {}, None

    def clear_lines(self) -> None:
        self._lines, self._audit = [], None

    def add(self, events: Sequence[LifeEvent], lines: Sequence[JournalLine]) -> None:
        new = [event for event in events if event.id not in self._events]
        self._events |= {event.id: event for event in new}
        self._lines += lines
        if self._audit is not None and not new and not lines:
            return
        if self._audit is not None and self._continues(self._audit, new, lines):
            replay_events(new, self._audit)
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
        lineage, steps = self._audit.lineage, self._audit.lineage.steps
        self._corrected_to = max(lineage.restored_to, lineage.rewound_to or 0)
        self._corrected = {each.number for line in steps if line.step <= self._corrected_to for each in line.groups}
        self._corrected.update(*lineage.rewound.values())
        self._is_complete = all(each.number in self._audit.groups for line in steps for each in line.groups)

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
            and all(each.number in audit.groups or each.number in numbers for line in steps for each in line.groups)
        )
