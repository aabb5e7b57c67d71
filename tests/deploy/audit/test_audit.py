"""The audit says in words what does not hold, and nothing of what does."""

import math

import pytest

from offbeat.deploy.audit.audit import Evidence, audit
from offbeat.services.buffer.api import Counters
from offbeat.services.buffer.group_ledger import LifeEvent
from offbeat.trainer.learner.step_ledger import (
    ReconciledLine,
    ResumedLine,
    StepLine,
    TrainedGroup,
)
from tests.copying import replace


def life(*rows: tuple[int, str, str]) -> list[LifeEvent]:
    return [LifeEvent(f"{1000 + i}-0", i + 1, number, event, detail) for i, (number, event, detail) in enumerate(rows)]


def step(number: int, *groups: int, epoch: int = 1, version: int | None = None) -> StepLine:
    oldest = number - 1 if version is None else version
    return StepLine(number, epoch, tuple(TrainedGroup(n, oldest, True) for n in groups), 1.0, False, refilled=())


EVENTS = life(
    (0, "admitted", "0"),
    (1, "admitted", "0"),
    (2, "admitted", "0"),
    (0, "submitted", "0"),
    (2, "submitted", "0"),
    (1, "failed", "step_timeout"),
    (3, "admitted", "1"),
    (3, "submitted", "1"),
    (4, "admitted", "1"),
    (4, "submitted", "1"),
    (4, "dropped", "stale"),
    (5, "admitted", "1"),
    (0, "trained", "2"),
    (2, "trained", "2"),
    (5, "submitted", "1"),
)
JOURNAL = [ResumedLine(0, 1, 0), step(1, 0), step(2, 2), step(3, 3)]
GOOD = Evidence(EVENTS, JOURNAL, {2: ""}, Counters(6, 5, 2, {"stale": 1}, {"step_timeout": 1}, 2), 1, 9)


def test_groups_that_are_refilled_before_their_checkpoint_have_no_event():
    counters = Counters(6, 5, 2, {"stale": 1, "no_signal": 1}, {"step_timeout": 1}, 1, refilled=1)
    assert audit(replace(GOOD, counters=counters)).findings == []


def test_a_step_of_a_build_that_recorded_no_refilled_groups_may_be_repeated():
    earlier = [*JOURNAL[:-1], replace(step(3, 3), refilled=None), ResumedLine(2, 2, 0)]
    found = audit(replace(GOOD, journal=[*earlier, replace(step(3, 3, epoch=2), refilled=(4,))]))
    assert not [each for each in found.findings if "refilled" in each]


def test_a_run_in_order_is_proven_and_each_group_has_its_life():
    found = audit(GOOD)
    assert found.proven, found.findings
    states = {n: (group.state, group.detail, group.step) for n, group in found.groups.items()}
    assert states == {
        0: ("trained", "2", 1),
        1: ("failed", "step_timeout", None),
        2: ("trained", "2", 2),
        3: ("in the stream", "", 3),
        4: ("dropped", "stale", None),
        5: ("in the stream", "", None),
    }
    assert found.staleness == {0: 3}


def without(number: int, event: str) -> list[LifeEvent]:
    kept = [each for each in EVENTS if (each.number, each.event) != (number, event)]
    return [replace(each, ordinal=i + 1) for i, each in enumerate(kept)]


def more(*rows: tuple[int, str, str]) -> list[LifeEvent]:
    return life(*((each.number, each.event, each.detail) for each in EVENTS), *rows)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"events": EVENTS[:4] + EVENTS[5:]}, "event 5 before 1005-0 are missing"),
        ({"events": more((1, "dropped", "stale"))}, "group 1 was dropped at 1015-0 after it had been failed"),
        ({"events": more((0, "trained", "3"))}, "group 0 was trained at 1015-0 after it had been trained (2)"),
        ({"events": more((2, "submitted", "0"))}, "group 2 was submitted at 1015-0 after it had been trained"),
        ({"events": more((5, "admitted", "0"))}, "group 5 was admitted twice"),
        ({"events": more((9, "admitted", "0"))}, "groups 6, 7, 8 were never admitted, though group 9 was"),
        ({"events": without(0, "submitted")}, "group 0 was trained, though it never entered the stream"),
        ({"events": without(2, "trained")}, "Redis counts 2 groups as trained, the ledger lists 1"),
        ({"events": more((5, "trained", "2"))}, "group 5 was acknowledged as trained, but in no step"),
        ({"events": more((3, "trained", "2"))}, "group 3 of step 3 was acknowledged by the checkpoint of step 2 before"),
        ({"events": more((3, "dropped", "stale"))}, "group 3 was trained at step 3, and dropped (stale)"),
        ({"journal": [*JOURNAL, step(4, 0)]}, "group 0 was trained twice: at step 1 and at step 4"),
        ({"journal": [*JOURNAL, step(5, 5)]}, "step 5 follows step 3"),
        ({"journal": [*JOURNAL, step(4, 5, 7)]}, "step 4 consumed 2 groups instead of 1"),
        ({"journal": [*JOURNAL, step(4, 5, version=1)]}, "group 5 was trained at step 4 with a lag of 2, above 1"),
        ({"journal": [*JOURNAL, step(4, 5, version=4)]}, "group 5 of step 4 holds tokens of the later version 4"),
        ({"journal": [*JOURNAL, ResumedLine(2, 2, 0), step(3, 5, epoch=2)]}, "step 3 was repeated on groups [5]"),
        ({"journal": [*JOURNAL, ResumedLine(2, 2, 0), replace(step(3, 3, epoch=2), refilled=(4,))]},
         "step 3 was repeated with groups [4] refilled, and had refilled []"),
        ({"journal": [*JOURNAL, ResumedLine(7, 2, 0)]}, "resumed from step 7, but the ledger ends at step 3"),
        ({"checkpoints": {2: "model.safetensors is damaged"}}, "step-000002 can't be used: model.safetensors is damaged"),
        ({"checkpoints": {1: ""}}, "acknowledged for step 2, but the newest whole checkpoint is of step 1"),
        ({"max_steps": 2}, "all 2 steps are trained and saved, but groups 3, 5 are still open"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_said(change: dict, says: str):
    found = audit(replace(GOOD, **change))
    assert any(says in finding for finding in found.findings), found.findings


def test_a_learner_that_repeats_steps_after_a_death_is_in_order():
    again = [*JOURNAL, ResumedLine(2, 2, 0), step(3, 3, epoch=1), step(3, 3, epoch=2)]
    found = audit(replace(GOOD, journal=again))
    assert found.proven, found.findings
    assert (found.lineage.repeated, found.lineage.learners) == (1, 2)
    assert any("had been replaced" in note for note in found.notes)


def test_tokens_of_a_version_that_a_predecessor_published_may_be_trained_by_who_repeats_its_step():
    """The predecessor's lines went with the power; what it had published is in its successor's first line."""
    repeated = [step(1, 0, epoch=2), step(2, 2, epoch=2, version=2), step(3, 3, epoch=2)]
    found = audit(replace(GOOD, journal=[ResumedLine(0, 2, 0, newest_version=2), *repeated]))
    assert not [each for each in found.findings if "later version" in each]
    unknown = audit(replace(GOOD, journal=[ResumedLine(0, 2, 0), *repeated]))
    assert any("group 2 of step 2 holds tokens of the later version 2" in each for each in unknown.findings)


def test_a_step_without_a_bound_may_have_any_lag():
    """As those before a resumption with `stale_policy: drop` of a run with `train`."""
    late = replace(step(4, 5, version=0), max_staleness=math.inf)
    assert audit(replace(GOOD, journal=[*JOURNAL, late])).findings == []


def test_a_redis_that_lost_its_newest_events_is_a_note_not_a_finding():
    lost = [
        *EVENTS[:12],
        LifeEvent("2000-0", 11, 4, "dropped", "stale"),
        *(replace(each, id=f"{2001 + i}-0", ordinal=12 + i) for i, each in enumerate(EVENTS[11:])),
    ]
    found = audit(replace(GOOD, events=lost))
    assert found.proven, found.findings
    assert any("without its newest 2 events" in note for note in found.notes)


def test_a_redis_that_lost_everything_counts_by_the_checkpoint():
    journal = [*JOURNAL, ResumedLine(2, 2, 2), step(3, 2 + 1, epoch=2)]
    events = [LifeEvent("9000-0", 1, 3, "admitted", "2"), LifeEvent("9001-0", 2, 3, "submitted", "2")]
    counters = Counters(3, 3, 2, {}, {}, 1)
    found = audit(replace(GOOD, events=[*EVENTS, *events], journal=journal, counters=counters))
    assert found.proven, found.findings
    assert [found.groups[n].step for n in (0, 2)] == [1, 2]


def test_checkpoints_that_are_gone_leave_their_groups_dropped_as_rewound():
    journal = [*JOURNAL, ResumedLine(1, 2, -1), step(2, 5, epoch=2)]
    counters = Counters(6, 5, 1, {"stale": 1, "rewound": 1}, {"step_timeout": 1}, 2)
    found = audit(replace(GOOD, journal=journal, checkpoints={1: ""}, counters=counters))
    assert found.groups[2].detail == "rewound"
    assert found.findings == []


def reconciled(*rows: tuple[int, str, str], since: int) -> list[LifeEvent]:
    """Events of a Redis that came back with the first `since`, and went on."""
    return [
        LifeEvent(f"{2000 + i}-0", since + 1 + i, number, event, detail)
        for i, (number, event, detail) in enumerate(rows)
    ]


LOST_JOURNAL = [
    ResumedLine(0, 1, 0, 1),
    step(1, 0),
    ReconciledLine(1, 1, 2, 2),
    step(2, 2),
    step(3, 3),
    ResumedLine(2, 2, 0, 2),
    step(3, 3, epoch=2),
]


def test_a_redis_that_lost_events_and_was_reconciled_is_proven():
    """Redis had kept the admissions alone; group 2 was held by the learner, group 5 was unknown."""
    after = reconciled(
        (0, "restored", "1:0"),
        (2, "submitted", "0"),
        (0, "reconciled", "2"),
        (3, "admitted", "1"),
        (3, "submitted", "1"),
        (4, "admitted", "1"),
        (4, "dropped", "lost"),
        (2, "trained", "2"),
        since=3,
    )
    events = [*EVENTS, *after]
    evidence = Evidence(events, LOST_JOURNAL, {2: ""}, Counters(5, 2, 2, {"lost": 1}, {}, 2), 1, 9)
    found = audit(evidence)
    assert found.proven, found.findings
    assert [found.groups[number].state for number in range(5)] == [
        "trained",
        "being played",
        "trained",
        "in the stream",
        "dropped",
    ]
    assert any("reconciled as incarnation 2" in note for note in found.notes)
    assert any("1 groups were counted as trained again" in note for note in found.notes)


def test_an_emptied_redis_whose_groups_the_journal_restored_is_proven():
    after = reconciled(
        (0, "restored", "1:0"), (2, "restored", "2:2"), (1, "admitted", "0"), (1, "dropped", "lost"), since=0
    )
    journal = [*JOURNAL, ResumedLine(2, 2, 0, 2), step(3, 7, epoch=2)]
    after += reconciled((3, "admitted", "0"), (3, "dropped", "lost"), since=4)
    after += reconciled(*((n, "admitted", "2") for n in (4, 5, 6, 7)), (7, "submitted", "2"), since=6)
    events = [replace(event, id=f"{2000 + i}-0") for i, event in enumerate(after)]
    found = audit(Evidence([*EVENTS, *events], journal, {2: ""}, Counters(8, 3, 2, {"lost": 2}, {}, 4), 1, 9))
    assert found.proven, found.findings


def test_a_reconciliation_hides_no_violation():
    twice = [*LOST_JOURNAL[:4], step(3, 0)]
    assert any("group 0 was trained twice" in each for each in audit(replace(GOOD, journal=twice)).findings)
    events = [*EVENTS, *reconciled((0, "restored", "1:0"), since=len(EVENTS))]
    assert any(
        "restored" in each and "after it had been trained" in each
        for each in audit(replace(GOOD, events=events)).findings
    )
    unpublished = [*JOURNAL[:3], step(3, 3, version=9)]
    assert any("of the later version 9" in each for each in audit(replace(GOOD, journal=unpublished)).findings)
    changed = [*JOURNAL, ResumedLine(2, 2, 0, 0), step(3, 5, epoch=2)]
    assert any("step 3 was repeated" in each for each in audit(replace(GOOD, journal=changed)).findings)
