"""Tracker's position in `metrics.jsonl`, stored in the run folder's `trackers/<name>.json`.

Invariant: it moves only past lines that the tracker accepted, has, or refused while accepting others.
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
    key: str = ""
    """The tracker's run id."""
    lineage: str = ""
    """Of the rows' weights."""
    number: int = 0
    """Lines processed."""
    offset: int = 0
    """Bytes processed."""
    step: int = 0
    """The learner's newest."""
    evaluations: list[str] = field(default_factory=list[str])
    """Sent ones, as `when-sampling-step`; `sampling-step` is `during`, and all that earlier builds wrote."""
    repeated: int = 0
    """Rows skipped as sent before."""
    refused: int = 0
    """Refused while others were accepted."""
    place: str = ""
    """URL or folder."""

    def open(self, lineage: str, *, keep_key: bool) -> bool:
        """Start or resume; return whether resumed. A new lineage gets a new key unless `keep_key`."""
        resumed = bool(self.key) and (keep_key or lineage == self.lineage)
        if not resumed:
            self.key, self.step, self.evaluations = uuid.uuid4().hex[:KEY_CHARS], 0, []
        self.lineage = lineage
        return resumed

    def is_sent(self, record: Mapping[str, Any]) -> bool:
        if record["step"] is None:
            return False
        if record["source"] == "learner":
            return record["step"] <= self.step
        return record["source"] == "eval" and _evaluation_id(record) in self.evaluations

    def advance(self, number: int, offset: int, record: Mapping[str, Any] | None) -> None:
        """Move past line `number`, to byte `offset`."""
        self.number, self.offset = number, offset
        if record is None or record["step"] is None or self.is_sent(record):
            return
        if record["source"] == "learner":
            self.step = record["step"]
        elif record["source"] == "eval":
            self.evaluations.append(_evaluation_id(record))


def _evaluation_id(record: Mapping[str, Any]) -> str:
    labels = record["labels"]
    when, name = labels.get("when", "during"), f"{labels.get('sampling', 'sampled')}-{record['step']}"
    return name if when == "during" else f"{when}-{name}"


def progress_file(output_dir: Path, name: str) -> Path:
    return output_dir / TRACKERS / f"{folder_name(name)}.json"


def tracker_folder(output_dir: Path, name: str) -> Path:
    return output_dir / TRACKERS / folder_name(name)


def folder_name(name: str) -> str:
    return name.replace(":", ".")


def read_progress(path: Path) -> DeliveryCursor:
    return DeliveryCursor(**json.loads(path.read_text())) if path.exists() else DeliveryCursor()


def write_progress(path: Path, progress: DeliveryCursor) -> None:
    """Store atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(progress)) + "\n")
    os.replace(temporary, path)
