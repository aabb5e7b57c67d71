"""On-disk ledger of optimizer steps.

Invariants: a step's line is durable before a checkpoint with it; a resumed learner writes a line, then repeats later
steps with the same groups, unless Redis has lost data.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offbeat.services.buffer.api import Proof, Reconciled
from offbeat.services.buffer.group_ledger import newest_event_ms
from offbeat.services.durable_files import FULL_DISK
from offbeat.services.errors import FencedError
from offbeat.services.jsonl import LinesFile, last_lines, read_lines
from offbeat.services.messages.types import Group
from offbeat.trainer.data.replay_buffer import NO_REPLAY, ReplayedGroups
from offbeat.trainer.learner.saved_steps import SavedSteps
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, newest_id

logger = logging.getLogger(__name__)

STEPS_FILE = Path("ledger", "steps.jsonl")


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    number: int
    oldest_version: int
    """Among its tokens."""
    computed: bool
    """False if masked."""
    tag: str = ""
    """Empty before 0.3, like the following."""
    rewards: tuple[float, ...] = ()
    """As the env gave them."""
    num_sampled: int = 0
    """Tokens."""


@dataclass(frozen=True, slots=True)
class StepLine:
    step: int
    """Version produced."""
    epoch: int
    groups: tuple[TrainedGroup, ...]
    max_staleness: float
    """Infinite with `stale_policy: train`."""
    skipped: bool
    """True if non-finite gradients left the weights alone."""
    at: float = 0.0
    """Unix time."""
    refilled: tuple[int, ...] | None = None
    """Numbers of groups without signal that others replaced; None in lines of earlier builds."""


@dataclass(frozen=True, slots=True)
class ResumedLine:
    """Learner's start at version `step`."""

    step: int
    epoch: int
    restored: int
    """Change to the buffer's number of trained groups."""
    incarnation: int = 0
    """Number of the run's data in Redis; 0 by older versions."""
    newest_version: int = -1
    """Published by predecessors, whose own lines may be lost; -1 if none."""


@dataclass(frozen=True, slots=True)
class ReconciledLine:
    """Reconciliation at version `step`."""

    step: int
    epoch: int
    incarnation: int
    corrected: int


@dataclass(frozen=True, slots=True)
class LeaseLine:
    """Lease, noted before its learner acts."""

    epoch: int


JournalLine = StepLine | ResumedLine | ReconciledLine | LeaseLine


class StepLedger:
    def __init__(self, output_dir: Path, epoch: int, on_problem: Callable[[str], None] = lambda _: None) -> None:
        """on_problem: receives why lines are refused, and an empty text once they are written."""
        self._output_dir = output_dir
        self._lines = LinesFile(output_dir / STEPS_FILE)
        self._epoch = epoch
        self._unwritten: list[dict[str, Any]] = []
        """Rows that a full disk has refused."""
        self._on_problem = on_problem
        self._is_reported = False

    def write_lease(self) -> None:
        """Append a line durably."""
        self._write({"lease": True})
        self.sync()

    def write_resumed(self, step: int, restored: int = 0, incarnation: int = 0, *, newest_version: int = -1) -> None:
        row = {"resumed": step, "restored": restored, "incarnation": incarnation, "newest_version": newest_version}
        self._write(row)

    def write_reconciled(self, step: int, result: Reconciled) -> None:
        row = {"reconciled": step, "incarnation": result.incarnation, "corrected": result.num_corrected}
        self._write(row)

    def prove(self, step: int, num_trained: int, next_number: int, entry_ids: Sequence[str] = ()) -> Proof:
        """Return what a checkpoint of `step` has trained. entry_ids: the checkpoint's, if lines are missing.

        Raises:
            FencedError: a newer learner has written to the journal.
        """
        saved = SavedSteps(step)
        saved.read(self._output_dir / STEPS_FILE)
        for row in self._unwritten:
            saved.add(row)
        if saved.newest_epoch > self._epoch:
            raise FencedError(f"a learner of epoch {saved.newest_epoch} has taken the run from epoch {self._epoch}")
        return Proof(
            saved=saved.groups,
            entry_ids=() if saved.num_groups >= num_trained else tuple(entry_ids),
            step=step,
            num_trained=num_trained,
            next_number=next_number,
            incarnation=saved.incarnation,
            newest_event_ms=newest_event_ms(self._output_dir),
            newest_metric_id=newest_id(self._output_dir / METRICS_FILE),
        )

    def write_step(
        self, step: int, taken: StepGroups, *, max_staleness: float, skipped: bool, replayed: ReplayedGroups = NO_REPLAY
    ) -> None:
        computed = {group.number for group in taken.trained}
        groups = [[group.number, group.oldest_version, int(group.number in computed)] for group in taken.groups]
        members = [_member_row(group) for group in taken.groups]
        bound = max_staleness if math.isfinite(max_staleness) else None
        again = {"again": [group.number for group in replayed.groups]} if replayed.groups else {}
        refilled = [group.number for group in taken.refilled]
        line = {"step": step, "groups": groups, "max_staleness": bound, "skipped": skipped, "members": members}
        self._write({**line, **again, "refilled": refilled})

    def sync(self) -> None:
        """Make all lines durable. Raises OSError: the disk is still full."""
        self._append()
        self._lines.sync()

    def close(self) -> None:
        """Try refused lines once more."""
        try:
            self._append()
        except OSError as error:
            logger.error("%d lines of %s are lost: %s", len(self._unwritten), STEPS_FILE, error)
        self._lines.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        """Append a line; one that a full disk refuses waits for the next, or for `sync`."""
        self._unwritten.append({**row, "epoch": self._epoch, "at": round(time.time(), 3)})
        try:
            self._append()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            self._is_reported = True
            self._on_problem(f"{STEPS_FILE} can't be written ({error}); its lines wait for room")

    def _append(self) -> None:
        while self._unwritten:
            self._lines.append(self._unwritten[:1])
            del self._unwritten[0]
        if self._is_reported:
            self._is_reported = False
            self._on_problem("")


def _member_row(group: Group) -> list[object]:
    rewards = [round(t.reward, 6) if math.isfinite(t.reward) else None for t in group.trajectories]
    return [group.tag, rewards, sum(trajectory.num_sampled for trajectory in group.trajectories)]


def _to_float(value: object) -> float:
    return math.nan if value is None else float(cast(float, value))


def note_lease(output_dir: Path, epoch: int) -> None:
    ledger = StepLedger(output_dir, epoch)
    try:
        ledger.write_lease()
    finally:
        ledger.close()


def newest_epoch(output_dir: Path) -> int:
    """Return the greatest epoch of the newest lines; 0 without any."""
    lines = (parse_journal_line(row) for row in last_lines(output_dir / STEPS_FILE))
    return max((line.epoch for line in lines if line is not None), default=0)


def read_step_ledger(output_dir: Path) -> tuple[list[JournalLine], int]:
    """Return the lines and the number of unreadable ones."""
    lines: list[JournalLine] = []
    num_unreadable = 0
    for row in read_lines(output_dir / STEPS_FILE):
        line = None if row is None else parse_journal_line(row)
        if line is None:
            num_unreadable += 1
        else:
            lines.append(line)
    return lines, num_unreadable


def parse_journal_line(row: Mapping[str, Any]) -> JournalLine | None:
    try:
        epoch = int(row["epoch"])
        if "resumed" in row:
            return ResumedLine(
                int(row["resumed"]),
                epoch,
                int(row["restored"]),
                int(row.get("incarnation", 0)),
                int(row.get("newest_version", -1)),
            )
        if "lease" in row:
            return LeaseLine(epoch)
        if "reconciled" in row:
            return ReconciledLine(int(row["reconciled"]), epoch, int(row["incarnation"]), int(row["corrected"]))
        members = row.get("members") or [("", (), 0)] * len(row["groups"])
        groups = tuple(
            TrainedGroup(int(n), int(v), bool(c), str(tag), tuple(map(_to_float, rewards)), int(tokens))
            for (n, v, c), (tag, rewards, tokens) in zip(row["groups"], members, strict=True)
        )
        bound = math.inf if row["max_staleness"] is None else float(row["max_staleness"])
        skipped, refilled = bool(row["skipped"]), tuple(map(int, row["refilled"])) if "refilled" in row else None
        return StepLine(int(row["step"]), epoch, groups, bound, skipped, float(row.get("at", 0.0)), refilled)
    except (ValueError, TypeError, KeyError):
        return None
