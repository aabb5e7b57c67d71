"""Counts of a ledger's events, each once."""

from pathlib import Path

from offbeat.deploy.console.ledger_counts import LedgerCounts
from offbeat.services.buffer.group_ledger import LedgerFile, LifeEvent

EVENTS = [
    LifeEvent("1000-0", 1, 0, "admitted", "0"),
    LifeEvent("1000-1", 2, 1, "admitted", "0"),
    LifeEvent("1001-0", 3, 0, "submitted", "0"),
    LifeEvent("1002-0", 4, 0, "dropped", "stale"),
]


def counts_of(folder: Path, *parts: list[LifeEvent]) -> LedgerCounts:
    file, counts = LedgerFile(folder), LedgerCounts(folder)
    for events in parts:
        file.append(events)
        counts.refresh()
    file.close()
    return counts


def test_a_line_that_two_learners_wrote_counts_once(tmp_path: Path) -> None:
    counts = counts_of(tmp_path, EVENTS[:3], EVENTS[1:])
    assert counts.num_of == {"admitted": 2, "submitted": 1, "dropped": 1}
    assert (counts.reasons["dropped"], counts.num_ended) == ({"stale": 1}, 1)


def test_events_count_after_redis_lost_its_data(tmp_path: Path) -> None:
    """It numbers them from 1 again, or from the last one that a replica had."""
    emptied = [LifeEvent("2000-0", 1, 0, "reconciled", "2"), LifeEvent("2001-0", 2, 2, "admitted", "1")]
    counts = counts_of(tmp_path, EVENTS, emptied)
    assert (counts.num_of["admitted"], counts.num_of["reconciled"]) == (3, 1)


def test_events_of_an_older_version_are_left_out(tmp_path: Path) -> None:
    """They have no ordinals; an audit ignores them, too."""
    counts = counts_of(tmp_path, [LifeEvent("900-0", 0, 0, "admitted", "0"), *EVENTS])
    assert counts.num_of["admitted"] == 2
