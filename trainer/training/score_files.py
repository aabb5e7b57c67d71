"""Scores of a dataset's rows, in files beside it: `DATASET.scores/ROLE@DIGEST/`.

Invariants: a file is written atomically and names how many rows it covers; a row's scores are read only for the same
tokens.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from offbeat.services.errors import ControlError
from offbeat.services.messages.types import Group

ROWS_PER_FILE = 256
SUFFIX = ".safetensors"
NUM_ROWS = "num_rows"
"""Key of a file's metadata: rows that it covers, also those without scores."""
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


class ScoreFiles:
    def __init__(self, dataset: Path, key: str) -> None:
        self.folder = dataset.with_name(f"{dataset.name}.scores") / key
        self._open: dict[int, safe_open] = {}

    def missing_files(self, num_rows: int) -> list[range]:
        """Return the rows of each file that is missing, or covers fewer since the dataset has grown."""
        starts = range(0, num_rows, ROWS_PER_FILE)
        rows = [range(start, min(start + ROWS_PER_FILE, num_rows)) for start in starts]
        return [part for part in rows if self._count(part.start) < len(part)]

    def write(self, rows: range, scores: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Write a file. scores: row -> token digest and scores; rows without any are excluded from training."""
        path = self._path(rows.start)
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.{os.getpid()}")
        arrays = {str(row): np.frombuffer(digest + blob, np.uint8) for row, (digest, blob) in scores.items()}
        save_file(arrays, staging, metadata={NUM_ROWS: str(len(rows))})
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
            raise ControlError(
                f"{self.folder} has no scores of row {row + 1}: {remove}run `{COMMAND} CONFIG`"
            ) from error
        if stored[:DIGEST_BYTES] != digest:
            raise ControlError(
                f"{self.folder}: row {row + 1} was scored with other tokens (the dataset, chat template or `data` changed): "
                f"remove the folder and run `{COMMAND} CONFIG`"
            )
        return stored[DIGEST_BYTES:]

    def _count(self, first: int) -> int:
        """Return how many rows a file covers; 0 without a readable file."""
        try:
            with safe_open(self._path(first), framework="numpy") as file:
                return int((file.metadata() or {}).get(NUM_ROWS, 0))
        except (OSError, SafetensorError):
            return 0

    def _path(self, first: int) -> Path:
        return self.folder / f"rows-{first:08d}{SUFFIX}"
