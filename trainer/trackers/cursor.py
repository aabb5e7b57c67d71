"""A tracker's position in a run's `metrics.jsonl`, kept in `trackers/<name>.json` in the run's folder across restarts.

Invariant: the position moves only past lines that the tracker has accepted, already has, or has refused while accepting
others.
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
class DeliveryCursor:
    """Position of a tracker and its counters, as stored."""

    key: str = ""
    """The run's id in the tracker."""
    lineage: str = ""
    """Lineage of the weights that the rows belong to."""
    number: int = 0
    """Lines processed."""
    offset: int = 0
    """Bytes processed."""
    step: int = 0
    """The learner's newest step."""
    evaluations: list[str] = field(default_factory=list[str])
    """Evaluations already sent, as `sampling-step`."""
    repeated: int = 0
    """Rows skipped because the same step or evaluation was sent before."""
    refused: int = 0
    """Rows that the tracker refused while it accepted others."""
    place: str = ""
    """URL or folder at which the run can be viewed."""

    def open(self, lineage: str, *, keep_key: bool) -> bool:
        """Start or resume the run and return True if resumed; a new lineage gets a new key.

        keep_key: resume whatever the lineage.
        """
        resumed = bool(self.key) and (keep_key or lineage == self.lineage)
        if not resumed:
            self.key, self.step, self.evaluations = uuid.uuid4().hex[:KEY_CHARS], 0, []
        self.lineage = lineage
        return resumed

    def is_sent(self, record: Mapping[str, Any]) -> bool:
        """True if the record's step or evaluation was already sent."""
        if record["step"] is None:
            return False
        if record["source"] == "learner":
            return record["step"] <= self.step
        return record["source"] == "eval" and _evaluation_id(record) in self.evaluations

    def advance(self, number: int, offset: int, record: Mapping[str, Any] | None) -> None:
        """Move past line `number`, which ends at byte `offset`."""
        self.number, self.offset = number, offset
        if record is None or record["step"] is None or self.is_sent(record):
            return
        if record["source"] == "learner":
            self.step = record["step"]
        elif record["source"] == "eval":
            self.evaluations.append(_evaluation_id(record))


def _evaluation_id(record: Mapping[str, Any]) -> str:
    return f"{record['labels'].get('sampling', 'sampled')}-{record['step']}"


def progress_file(output_dir: Path, name: str) -> Path:
    """Return the path of a tracker's progress file. name: tracker name or class path."""
    return output_dir / TRACKERS / f"{folder_name(name)}.json"


def tracker_folder(output_dir: Path, name: str) -> Path:
    """Return a tracker's own subfolder of the run's folder."""
    return output_dir / TRACKERS / folder_name(name)


def folder_name(name: str) -> str:
    """Return a tracker's name in a form valid for files."""
    return name.replace(":", ".")


def read_progress(path: Path) -> DeliveryCursor:
    """Load the stored progress, or an empty one if there is none."""
    return DeliveryCursor(**json.loads(path.read_text())) if path.exists() else DeliveryCursor()


def write_progress(path: Path, progress: DeliveryCursor) -> None:
    """Store the progress atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(progress)) + "\n")
    os.replace(temporary, path)
