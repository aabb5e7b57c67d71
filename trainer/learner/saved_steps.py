"""Groups of a journal's surviving steps, as numbers alone: a long run has millions.

Invariant: the steps are those of `parse_journal_line`; a line that it does not take counts for nothing here.
"""

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, gc=False):
    """Line of `ledger/steps.jsonl`, whose other fields are not decoded."""

    epoch: int
    step: int | None = None
    groups: list[tuple[Number, int, int]] = []
    resumed: int | None = None
    incarnation: int = 0
    lease: bool = False
    reconciled: int | None = None


DECODER = msgspec.json.Decoder(_Line)


class SavedSteps:
    """Steps up to `step` in the lineage of the lines that were added."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._epoch = 0
        self._steps: list[tuple[int, array[int]]] = []
        self.newest_epoch = 0
        self.incarnation = 0
        """Greatest."""

    @property
    def groups(self) -> list[tuple[int, "array[int]"]]:
        """Return the numbers of each step's groups."""
        return [each for each in self._steps if each[0] <= self._step]

    @property
    def num_groups(self) -> int:
        return sum(len(numbers) for _, numbers in self.groups)

    def read(self, path: Path) -> None:
        """Add the lines of a file, if it exists."""
        if not path.is_file():
            return
        with path.open("rb") as file:
            for text in file:
                try:
                    self._add(DECODER.decode(text))
                except (msgspec.DecodeError, UnicodeDecodeError):  # cut, of a full disk
                    continue

    def add(self, row: Mapping[str, Any]) -> None:
        self._add(msgspec.convert(row, _Line))

    def _add(self, line: _Line) -> None:
        self.newest_epoch = max(self.newest_epoch, line.epoch)
        if line.resumed is not None or line.reconciled is not None:
            self.incarnation = max(self.incarnation, line.incarnation)
        if line.lease or line.reconciled is not None or line.epoch < self._epoch:
            return  # or of a learner that had been replaced
        newest = line.resumed if line.resumed is not None else None if line.step is None else line.step - 1
        if newest is None:
            return
        self._epoch = line.epoch
        while self._steps and self._steps[-1][0] > newest:
            self._steps.pop()
        if line.resumed is None:
            self._steps.append((newest + 1, array("q", [number for number, _, _ in line.groups])))
