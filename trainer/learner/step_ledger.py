"""Ledger of optimizer batches on disk: the learner's half of the audit, next to the buffer's (`groups.jsonl`).

Invariants: a step's line is written when its weights exist, and is durable before the checkpoint that contains the
step; a learner that resumes writes so, and the steps after the checkpoint follow again, with the same groups.
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
    """A group that an optimizer batch consumed."""

    number: int
    oldest_version: int
    """Oldest version that sampled one of its tokens."""
    computed: bool
    """False: it carried no signal, and counted without being computed on."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """One optimizer batch."""

    step: int
    """The batch that turned version `step - 1` into version `step`."""
    epoch: int
    """Fencing epoch of the learner's lease."""
    groups: tuple[TrainedGroup, ...]
    max_staleness: float
    skipped: bool
    """True if the gradient was not finite and the weights did not change."""


@dataclass(frozen=True, slots=True)
class ResumedLine:
    """A learner began, at weights version `step`."""

    step: int
    epoch: int
    restored: int
    """Groups restored to the buffer's count; negative: groups that it had counted and gave up."""


class StepLedger:
    """Writes the lines of one learner."""

    def __init__(self, output_dir: Path, epoch: int) -> None:
        self._lines = LinesFile(output_dir / STEPS_FILE)
        self._epoch = epoch

    def resumed(self, step: int, restored: int = 0) -> None:
        """A learner begins at weights version `step`."""
        self._write({"resumed": step, "restored": restored})

    def trained(
        self, step: int, taken: StepGroups, *, max_staleness: float, skipped: bool, again: ReplayedGroups = NO_REPLAY
    ) -> None:
        """Weights version `step` exists. again: old groups that joined; skipped: see `StepLine`."""
        computed = {group.number for group in taken.signal}
        groups = [[group.number, group.oldest_version, int(group.number in computed)] for group in taken.groups]
        bound = max_staleness if math.isfinite(max_staleness) else None
        joined = {"again": [group.number for group in again.groups]} if again.groups else {}
        self._write({"step": step, "groups": groups, "max_staleness": bound, "skipped": skipped, **joined})

    def sync(self) -> None:
        """Bring every line to the disk."""
        self._lines.sync()

    def close(self) -> None:
        """Write no more."""
        self._lines.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._lines.append([{**row, "epoch": self._epoch, "at": round(time.time(), 3)}])


def read_step_ledger(output_dir: Path) -> tuple[list[StepLine | ResumedLine], int]:
    """The lines in the order in which they were written, and how many could not be read."""
    lines: list[StepLine | ResumedLine] = []
    broken = 0
    for row in read_lines(output_dir / STEPS_FILE):
        line = None if row is None else _parsed(row)
        if line is None:
            broken += 1
        else:
            lines.append(line)
    return lines, broken


def _parsed(row: Mapping[str, Any]) -> StepLine | ResumedLine | None:
    try:
        epoch = int(row["epoch"])
        if "resumed" in row:
            return ResumedLine(int(row["resumed"]), epoch, int(row["restored"]))
        groups = tuple(TrainedGroup(int(n), int(v), bool(c)) for n, v, c in row["groups"])
        bound = math.inf if row["max_staleness"] is None else float(row["max_staleness"])
        return StepLine(int(row["step"]), epoch, groups, bound, bool(row["skipped"]))
    except (ValueError, TypeError, KeyError):
        return None
