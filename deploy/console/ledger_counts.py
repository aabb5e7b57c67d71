"""Counts of all groups of a run, whose ledger may have more than memory has room for."""

import re
from collections import Counter
from pathlib import Path

from offbeat.deploy.audit.lives import DROPPED, FAILED, TRAINED
from offbeat.services.buffer.group_ledger import LEDGER_FILE

CHUNK_BYTES = 1 << 20
EVENT = re.compile(rb'"id":"(\d+)-(\d+)","ordinal":[1-9]\d*,"number":\d+,"event":"(\w+)","detail":"([^"\\]*)"')


class LedgerCounts:
    """Events as they were written, which losses in Redis and rewinds do not correct; `refresh` reads appended ones."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER_FILE
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._newest = 0, 0
        """Stream id; ordinals begin anew in a Redis that lost its data."""
        self.num_of: Counter[str] = Counter()
        """Events by name."""
        self.reasons: dict[str, Counter[str]] = {DROPPED: Counter(), FAILED: Counter()}

    @property
    def num_ended(self) -> int:
        return sum(self.num_of[ending] for ending in (TRAINED, DROPPED, FAILED))

    def refresh(self) -> None:
        """Raises OSError."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._clear()
            file.seek(self._offset)
            while lines := file.read(CHUNK_BYTES):
                lines += file.readline()
                complete = lines[: lines.rfind(b"\n") + 1]
                self._offset += len(complete)
                self._count(complete)
                if len(complete) < len(lines):
                    return

    def _count(self, lines: bytes) -> None:
        for milliseconds, sequence, event, detail in EVENT.findall(lines):
            place = int(milliseconds), int(sequence)
            if place <= self._newest:
                continue  # a line that a replaced learner appended again
            self._newest, name = place, event.decode()
            self.num_of[name] += 1
            if name in self.reasons:
                self.reasons[name][detail.decode()] += 1
