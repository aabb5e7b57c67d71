"""Scores of a dataset's rows, in files beside it: `DATASET.scores/ROLE@DIGEST/`.

Invariants: a file is written atomically, and is missing once the rows it was written from have changed; a row's scores
are read only for the same tokens.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from offbeat.services.errors import ControlError
from offbeat.services.messages.types import Group
from offbeat.trainer.config.scored_roles import REFERENCE

ROWS_PER_FILE = 256
SUFFIX = ".safetensors"
NUM_ROWS = "num_rows"
"""Key of a file's metadata: rows that it covers, also those without scores."""
STAMP = "dataset"
"""Key of a file's metadata: state of the dataset from which it was written."""
COMPARED = "compared"
"""File of the dataset's state whose rows were all found to be those of the files, so that a copy is compared once."""
ROW_DIGESTS = "row_digests"
"""Tensor of the digests of the rows that a file covers; earlier builds wrote none."""
DIGEST_BYTES = 16
COMMAND = "offbeat distill prepare"


def token_digest(group: Group) -> bytes:
    """Return a digest of the tokens and loss masks."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for trajectory in group.trajectories:
        for segment in trajectory.segments:
            digest.update(len(segment.tokens).to_bytes(8, "little"))
            digest.update(segment.tokens.astype("<i4").tobytes())
            digest.update(np.packbits(segment.loss_mask).tobytes())
    return digest.digest()


class RowSource(Protocol):
    stamp: str
    """State of the dataset, in which no digest changes."""

    @property
    def num_rows(self) -> int: ...

    def digest(self, row: int) -> bytes: ...


class ScoreFiles:
    def __init__(self, dataset: Path, key: str) -> None:
        self.folder = dataset.with_name(f"{dataset.name}.scores") / key
        is_own = key.startswith(f"{REFERENCE}@")  # the learner writes it before the first step
        self._advice = "start the run again" if is_own else f"run `{COMMAND} CONFIG`"
        self._open: dict[int, safe_open] = {}

    def missing_files(self, source: RowSource) -> list[range]:
        """Return the rows of each file that is missing, covers fewer, or was written from other rows."""
        starts = range(0, source.num_rows, ROWS_PER_FILE)
        rows = [range(start, min(start + ROWS_PER_FILE, source.num_rows)) for start in starts]
        stamps = {source.stamp, self._read_compared()}
        missing = [part for part in rows if not self._is_current(part, source, is_compared=len(stamps) == 1)]
        if not missing and len(stamps) > 1:
            self._note_compared(source.stamp)
        return missing

    def write(
        self, rows: range, scores: Mapping[int, tuple[bytes, bytes]], digests: Sequence[bytes], stamp: str
    ) -> None:
        """Write a file.

        scores: row -> token digest and scores; rows without any are excluded from training. digests, stamp: of the rows'
        source.
        """
        path = self._path(rows.start)
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.{os.getpid()}")
        arrays = {str(row): np.frombuffer(digest + blob, np.uint8) for row, (digest, blob) in scores.items()}
        arrays[ROW_DIGESTS] = np.frombuffer(b"".join(digests), np.uint8).reshape(len(rows), -1)
        save_file(arrays, staging, metadata={NUM_ROWS: str(len(rows)), STAMP: stamp})
        (self.folder / COMPARED).unlink(missing_ok=True)
        staging.replace(path)

    def read(self, row: int, digest: bytes) -> bytes:
        """Return a row's scores.

        Raises:
            ControlError: there are none, or of other tokens.
        """
        first = row - row % ROWS_PER_FILE
        try:
            if first not in self._open:
                self._open[first] = safe_open(self._path(first), framework="numpy")
            stored = self._open[first].get_tensor(str(row)).tobytes()
        except (OSError, SafetensorError) as error:
            path = self._path(first)  # it has none of rows that could not be trained when it was written
            remove = f"remove {path.name} and " if path.exists() else ""
            raise ControlError(f"{self.folder} has no scores of row {row + 1}: {remove}{self._advice}") from error
        if stored[:DIGEST_BYTES] != digest:
            raise ControlError(
                f"{self.folder}: row {row + 1} was scored with other tokens (the dataset, chat template or `data` changed): "
                f"remove the folder and {self._advice}"
            )
        return stored[DIGEST_BYTES:]

    def _read_compared(self) -> str:
        """Return the state of the dataset whose rows were last found to be those of all files, if any."""
        try:
            return (self.folder / COMPARED).read_text()
        except OSError:
            return ""

    def _note_compared(self, stamp: str) -> None:
        staging = self.folder / f".{COMPARED}.{os.getpid()}"
        with suppress(OSError):  # a folder that others prepared, and that may not be written
            staging.write_text(stamp)
            staging.replace(self.folder / COMPARED)

    def _is_current(self, rows: range, source: RowSource, *, is_compared: bool) -> bool:
        """Return whether a readable file covers the rows as they are. is_compared: their digests are known to be equal."""
        try:
            with safe_open(self._path(rows.start), framework="numpy") as file:
                metadata = file.metadata() or {}
                if int(metadata.get(NUM_ROWS, 0)) < len(rows):
                    return False
                is_compared = is_compared or metadata.get(STAMP) == source.stamp
                if is_compared or ROW_DIGESTS not in file.keys():  # noqa: SIM118 - no mapping
                    return True
                digests = file.get_tensor(ROW_DIGESTS)[: len(rows)].tobytes()
        except (OSError, SafetensorError):
            return False
        return digests == b"".join(map(source.digest, rows))

    def _path(self, first: int) -> Path:
        return self.folder / f"rows-{first:08d}{SUFFIX}"
