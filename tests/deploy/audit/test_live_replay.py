"""Lives read piece by piece are those of the whole ledgers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy.audit.lineage import trace
from offbeat.deploy.audit.live_replay import LiveReplay
from offbeat.deploy.audit.lives import replay
from offbeat.services.buffer.group_ledger import LifeEvent
from offbeat.trainer.learner.step_ledger import JournalLine, LeaseLine, ReconciledLine, ResumedLine
from tests.copying import replace as change
from tests.deploy.audit.test_audit import EVENTS, JOURNAL, life, more, step

LOST = [*EVENTS[:9], *(change(event, id=f"{2000 + i}-0") for i, event in enumerate(EVENTS[7:]))]
RESTORED = more((0, "restored", "3:3"), (0, "reconciled", "2"), (6, "admitted", "3"))
REPEATED = [*JOURNAL, ResumedLine(2, 2, 0), step(3, 3, epoch=1), step(3, 3, epoch=2), step(4, 5, epoch=2)]
REWOUND = [*JOURNAL, ResumedLine(1, 2, -2), step(2, 3, epoch=2)]
AFTER = [(0, "dropped", "stale"), (3, "trained", "3"), (6, "admitted", "2"), (5, "trained", "4"), (6, "submitted", "2")]
"""Also of groups whose lives the loss or the rewind before has corrected."""
LEDGERS: list[tuple[Sequence[LifeEvent], Sequence[JournalLine]]] = [
    (EVENTS, JOURNAL),
    (EVENTS, REPEATED),
    (EVENTS, REWOUND),
    (EVENTS, [*JOURNAL, step(5, 5)]),
    (EVENTS, [LeaseLine(1), *JOURNAL, LeaseLine(2), ReconciledLine(3, 2, 2, 1), step(4, 5, epoch=2)]),
    (LOST, JOURNAL),
    (RESTORED, [*JOURNAL, ResumedLine(3, 2, 1, 2), step(4, 6, epoch=2)]),
    (more(*AFTER), [*REWOUND, step(3, 5, epoch=2), step(4, 6, epoch=2)]),
    (
        more((0, "restored", "3:3"), (0, "reconciled", "2"), *AFTER, (6, "trained", "4")),
        [*JOURNAL, ResumedLine(3, 2, 1, 2), step(4, 6, epoch=2), ResumedLine(1, 3, -3), step(2, 5, epoch=3)],
    ),
    ([change(event, ordinal=0) for event in EVENTS], JOURNAL),
    (EVENTS[1:], JOURNAL),
]


@given(st.data())
def test_ledgers_in_pieces_give_the_lives_of_the_whole(data: st.DataObject) -> None:
    events, lines = data.draw(st.sampled_from(LEDGERS))
    cuts = st.lists(st.tuples(st.integers(0, len(events)), st.integers(0, len(lines))), max_size=6)
    seen, read = LiveReplay(), (0, 0)
    for until in [*data.draw(cuts), (len(events), len(lines))]:
        after = max(read[0], until[0]), max(read[1], until[1])
        seen.add(events[read[0] : after[0]], lines[read[1] : after[1]])
        read = after
        assert seen.lives == replay(sorted(events[: read[0]], key=lambda each: each.sort_key), lines[: read[1]]).groups


def test_what_continues_the_ledgers_is_applied_alone() -> None:
    seen = LiveReplay()
    seen.add(EVENTS[:8], JOURNAL[:3])
    before = dict(seen.lives)
    seen.add(EVENTS[8:], JOURNAL[3:])
    assert all(seen.lives[number] is each for number, each in before.items())
    seen.add(life(*((event.number, event.event, event.detail) for event in EVENTS))[-1:], [])
    assert all(seen.lives[number] is each for number, each in before.items())


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        (EVENTS, REWOUND),
        (RESTORED, [*JOURNAL, ResumedLine(3, 2, 1, 2)]),
        (EVENTS, [*JOURNAL, ReconciledLine(3, 1, 2, 1)]),
    ],
)
def test_steps_after_a_loss_or_a_rewind_are_applied_alone(
    events: Sequence[LifeEvent], lines: Sequence[JournalLine]
) -> None:
    seen = LiveReplay()
    seen.add(events, lines)
    seen.add([], [])
    before = dict(seen.lives)
    last, number, epoch = trace(lines).last, max(before) + 1, lines[-1].epoch
    event = change(events[-1], id="9000-0", ordinal=events[-1].ordinal + 1, number=number, event="admitted", detail="1")
    seen.add([event], [])
    seen.add([], [step(last + 1, number, epoch=epoch)])
    assert all(seen.lives[each] is life for each, life in before.items())
    assert seen.lives[number].step == last + 1


def test_nothing_new_replays_nothing() -> None:
    seen = LiveReplay()
    seen.add(EVENTS, REWOUND)
    before = dict(seen.lives)
    seen.add(EVENTS[-1:], [])
    assert all(seen.lives[number] is each for number, each in before.items())


@pytest.mark.parametrize("line", [ResumedLine(2, 2, 0), LeaseLine(2), step(5, 5)])
def test_anything_else_replays_all(line: JournalLine) -> None:
    seen = LiveReplay()
    seen.add(EVENTS, JOURNAL)
    before = dict(seen.lives)
    seen.add([], [line])
    assert all(seen.lives[number] is not each for number, each in before.items())
