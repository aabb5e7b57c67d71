"""On-disk ledger of optimizer steps; the buffer's ledger is `groups.jsonl`.

Invariants: a step's line is durable before a checkpoint with the step; a resumed learner writes a line, then repeats
later steps with the same groups.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.services.jsonl import LinesFile, read_lines
from offbeat.trainer.data.replay_buffer import NO_REPLAY, ReplayedGroups
from offbeat.trainer.learner.group_intake import StepGroups

STEPS_FILE = Path("ledger", "steps.jsonl")


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """Group of an optimizer batch."""

    number: int
    oldest_version: int
    """Oldest version among its tokens."""
    computed: bool
    """False for masked groups."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """One optimizer step."""

    step: int
    """Version that the step produced."""
    epoch: int
    groups: tuple[TrainedGroup, ...]
    max_staleness: float
    skipped: bool
    """True if the gradient was non-finite."""


@dataclass(frozen=True, slots=True)
class ResumedLine:
    """Start of a learner at version `step`."""

    step: int
    epoch: int
    restored: int
    """Change to the buffer's count of trained groups."""


class StepLedger:
    """Ledger writer."""

    def __init__(self, output_dir: Path, epoch: int) -> None:
        self._lines = LinesFile(output_dir / STEPS_FILE)
        self._epoch = epoch

    def write_resumed(self, step: int, restored: int = 0) -> None:
        """Append a `ResumedLine`."""
        self._write({"resumed": step, "restored": restored})

    def write_step(
        self, step: int, taken: StepGroups, *, max_staleness: float, skipped: bool, replayed: ReplayedGroups = NO_REPLAY
    ) -> None:
        """Append a `StepLine`."""
        computed = {group.number for group in taken.trained}
        groups = [[group.number, group.oldest_version, int(group.number in computed)] for group in taken.groups]
        bound = max_staleness if math.isfinite(max_staleness) else None
        again = {"again": [group.number for group in replayed.groups]} if replayed.groups else {}
        self._write({"step": step, "groups": groups, "max_staleness": bound, "skipped": skipped, **again})

    def sync(self) -> None:
        """Sync to disk."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._lines.append([{**row, "epoch": self._epoch, "at": round(time.time(), 3)}])


def read_step_ledger(output_dir: Path) -> tuple[list[StepLine | ResumedLine], int]:
    """Return the lines, and the number of unreadable ones."""
    lines: list[StepLine | ResumedLine] = []
    num_unreadable = 0
    for row in read_lines(output_dir / STEPS_FILE):
        line = None if row is None else _parse(row)
        if line is None:
            num_unreadable += 1
        else:
            lines.append(line)
    return lines, num_unreadable


def _parse(row: Mapping[str, Any]) -> StepLine | ResumedLine | None:
    try:
        epoch = int(row["epoch"])
        if "resumed" in row:
            return ResumedLine(int(row["resumed"]), epoch, int(row["restored"]))
        groups = tuple(TrainedGroup(int(n), int(v), bool(c)) for n, v, c in row["groups"])
        bound = math.inf if row["max_staleness"] is None else float(row["max_staleness"])
        return StepLine(int(row["step"]), epoch, groups, bound, bool(row["skipped"]))
    except (ValueError, TypeError, KeyError):
        return None
