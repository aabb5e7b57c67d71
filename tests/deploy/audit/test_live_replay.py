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


KEPT, STEPS = 20, 120


def run_ledgers(steps: int = STEPS, saved_every: int = 4) -> list[tuple[list[LifeEvent], list[JournalLine]]]:
    """Events and lines of each step: two groups that are trained, and one that is dropped."""
    rows: list[tuple[int, str, str]] = []
    parts: list[tuple[int, list[JournalLine]]] = [(0, [ResumedLine(0, 1, 0)])]
    for i in range(1, steps + 1):
        numbers = range(3 * i - 3, 3 * i)
        rows += [(number, "admitted", str(i - 1)) for number in numbers]
        rows += [(number, "submitted", str(i - 1)) for number in numbers[:2]]
        rows.append((numbers[2], "dropped", "stale"))
        if i % saved_every == 0:
            saved = range(3 * (i - saved_every), 3 * i)
            rows += [(number, "trained", str(i)) for number in saved if number % 3 < 2]
        parts.append((len(rows), [step(i, *numbers[:2])]))
    events = life(*rows)
    starts = [0, *(end for end, _ in parts)]
    return [(events[start:end], lines) for start, (end, lines) in zip(starts, parts, strict=False)]


def test_old_groups_are_forgotten_and_the_others_live_as_in_the_whole() -> None:
    seen, events, lines = LiveReplay(KEPT), list[LifeEvent](), list[JournalLine]()
    for new, written in run_ledgers():
        seen.add(new, written)
        events, lines = [*events, *new], [*lines, *written]
        whole = replay(events, lines).groups
        assert set(whole) - set(seen.lives) == {number for number in whole if number < seen.first_number}
        assert all(life == whole[number] for number, life in seen.lives.items())
        assert len(seen.lives) <= KEPT * 5 // 4
    assert seen.first_number >= 3 * STEPS - KEPT * 5 // 4


@pytest.mark.parametrize("resumed", [ResumedLine(STEPS - 2, 2, 0), ResumedLine(4, 2, -2 * (STEPS - 4))])
def test_a_resumed_run_lives_on_though_its_first_steps_are_forgotten(resumed: ResumedLine) -> None:
    """Also one that is rewound to a step that is forgotten."""
    ledgers = run_ledgers()
    seen, events, lines = LiveReplay(KEPT), list[LifeEvent](), list[JournalLine]()
    first = 3 * STEPS
    admitted = [(first + i, "admitted", str(resumed.step)) for i in range(3)]
    ordinal = sum(len(new) for new, _ in ledgers)
    again = [change(event, id=f"{9000 + i}-0", ordinal=ordinal + i + 1) for i, event in enumerate(life(*admitted))]
    step_after = step(resumed.step + 1, first, first + 1, epoch=2)
    for new, written in [*ledgers, ([], [resumed]), (again, [step_after])]:
        seen.add(new, written)
        events, lines = [*events, *new], [*lines, *written]
    whole = replay(events, lines).groups
    assert {number: life for number, life in whole.items() if number >= seen.first_number} == seen.lives
    assert seen.lives[first].step == resumed.step + 1


def test_memory_of_a_run_does_not_grow_with_its_groups() -> None:
    seen, sizes = LiveReplay(KEPT), list[int]()
    for new, written in run_ledgers(4 * STEPS):
        seen.add(new, written)
        sizes.append(len(seen._events) + len(seen._lines) + len(seen.lives))
    assert max(sizes[STEPS:]) <= max(sizes[:STEPS])


def test_groups_in_flight_are_not_searched_for_ended_ones_at_each_call() -> None:
    """SFT's groups end at their checkpoint's acknowledgement, and all of its events were filtered twice a second."""
    numbers = range(5 * KEPT)
    events = life(
        *((number, "admitted", "0") for number in numbers), *((number, "dropped", "stale") for number in numbers)
    )
    seen = LiveReplay(KEPT)
    seen.add(events[: 4 * KEPT], [])
    assert len(seen.lives) == 4 * KEPT, "all are in flight"
    searched = seen._events
    seen.add([], [])
    seen.add(events[4 * KEPT : 4 * KEPT + 2], [])
    assert seen._events is searched
    seen.add(events[4 * KEPT + 2 :], [])
    assert seen.lives.keys() == {*numbers[-KEPT:]}


def test_ledgers_read_from_their_middle_have_whole_lives_alone() -> None:
    ledgers = run_ledgers()
    half = ledgers[STEPS // 2 :]
    events, lines = [event for new, _ in half for event in new], [line for _, written in half for line in written]
    seen = LiveReplay(1000)
    seen.leave_out_earlier(events)
    seen.add(events, lines)
    whole = replay(
        [event for new, _ in ledgers for event in new], [line for _, each in ledgers for line in each]
    ).groups
    assert seen.first_number == min(seen.lives) > 0
    assert seen.lives == {number: life for number, life in whole.items() if number >= seen.first_number}


@pytest.mark.parametrize("first", [LeaseLine(1), ReconciledLine(STEPS // 2, 1, 1, 0)])
def test_a_journal_read_from_any_line_has_its_steps_in_their_places(first: JournalLine) -> None:
    """Steps without a place of the first would be replayed whole at each call."""
    half = run_ledgers()[STEPS // 2 + 1 :]
    events, lines = [event for new, _ in half for event in new], [line for _, written in half for line in written]
    seen = LiveReplay(1000)
    seen.leave_out_earlier(events)
    seen.add(events[:-1], [first, *lines[:-1]])
    before = dict(seen.lives)
    seen.add(events[-1:], lines[-1:])
    assert all(seen.lives[number] is each for number, each in before.items())
    assert seen.lives[3 * STEPS - 3].step == STEPS
