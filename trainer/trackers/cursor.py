"""How far a tracker is with a run's `metrics.jsonl`, over all its lives: `trackers/<name>.json` in the run's folder.

Invariant: the place moves only over lines that the tracker has taken, knows already, or has refused while it took others.
"""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRACKERS = "trackers"
KEY_CHARS = 16


@dataclass(slots=True)
class Progress:
    """Kept in a file."""

    key: str = ""
    """Under which the tracker knows the run."""
    lineage: str = ""
    """Of the weights that the rows belong to."""
    number: int = 0
    """Lines done."""
    offset: int = 0
    """Bytes done."""
    step: int = 0
    """The learner's newest one."""
    evaluations: list[str] = field(default_factory=list[str])
    """Those that are done."""
    repeated: int = 0
    """Rows left out because the same step, or evaluation, was sent before."""
    refused: int = 0
    """Rows that the tracker refused, while it took others."""
    place: str = ""
    """Where people see the run."""

    def open(self, lineage: str, *, goes_on: bool) -> bool:
        """Take up a life of the run; False if it is the first one of these weights.

        goes_on: the weights are those of the run before, whatever their lineage.
        """
        resumed = bool(self.key) and (goes_on or lineage == self.lineage)
        if not resumed:
            self.key, self.step, self.evaluations = uuid.uuid4().hex[:KEY_CHARS], 0, []
        self.lineage = lineage
        return resumed

    def knows(self, record: Mapping[str, Any]) -> bool:
        """Whether the record is of a step, or an evaluation, that is done."""
        if record["step"] is None:
            return False
        if record["source"] == "learner":
            return record["step"] <= self.step
        return record["source"] == "eval" and _evaluation(record) in self.evaluations

    def done(self, number: int, offset: int, record: Mapping[str, Any] | None) -> None:
        """Line `number`, which ends at byte `offset`, is done."""
        self.number, self.offset = number, offset
        if record is None or record["step"] is None or self.knows(record):
            return
        if record["source"] == "learner":
            self.step = record["step"]
        elif record["source"] == "eval":
            self.evaluations.append(_evaluation(record))


def _evaluation(record: Mapping[str, Any]) -> str:
    return f"{record['labels'].get('sampling', 'sampled')}-{record['step']}"


def progress_file(output_dir: Path, name: str) -> Path:
    """Where the progress of a tracker is kept. name: also a class path."""
    return output_dir / TRACKERS / f"{folder_name(name)}.json"


def tracker_folder(output_dir: Path, name: str) -> Path:
    """A tracker's own, in the run's folder."""
    return output_dir / TRACKERS / folder_name(name)


def folder_name(name: str) -> str:
    """A tracker's name as that of a file or folder."""
    return name.replace(":", ".")


def read_progress(path: Path) -> Progress:
    """What an earlier life left, if there was one."""
    return Progress(**json.loads(path.read_text())) if path.exists() else Progress()


def write_progress(path: Path, progress: Progress) -> None:
    """Keep it, whole or not at all."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(asdict(progress)) + "\n")
    os.replace(aside, path)
