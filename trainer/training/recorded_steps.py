"""Files of recorded steps, read without torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from offbeat.services.errors import CodecError
from offbeat.services.messages.types import Trajectory
from offbeat.trainer.data.group_codec import unpack_group

FOLDER = "batches"
PREFIX, TOKENS, SUFFIX = "step-", "tokens-", ".msgpack"
SCHEMA = 1
TOKENS_SCHEMA = 1
GROUPS, NUMBER = 3, 2
"""Indices in an unpacked batch, and in a packed group."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrajectoryTokens:
    """`TokenOutcomes` of a trajectory."""

    group: int
    index: int
    logprobs: Floats
    ratio: Floats
    advantages: Floats
    outcome: npt.NDArray[np.uint8]

    @property
    def max_ratio(self) -> float:
        ratios = self.ratio[np.isfinite(self.ratio)]
        return float(ratios.max()) if len(ratios) else math.nan


def decode_tokens(content: bytes) -> Iterator[TrajectoryTokens]:
    """Yield a step's trajectories; raises `CodecError`."""
    try:
        schema, _, rows = msgpack.unpackb(content)
        if schema != TOKENS_SCHEMA:
            raise CodecError(f"schema {schema}")
        yield from (_decode_row(row) for row in rows)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CodecError(f"malformed: {error}") from error


def _decode_row(row: Sequence[Any]) -> TrajectoryTokens:
    number, index, *floats, outcome = row
    logprobs, ratio, advantages = (np.frombuffer(column, dtype="<f4") for column in floats)
    return TrajectoryTokens(number, index, logprobs, ratio, advantages, np.frombuffer(outcome, dtype=np.uint8))


class RecordedSteps:
    """Batches of a run's folder, and the outcomes of their tokens."""

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir / FOLDER

    def steps(self, prefix: str = PREFIX) -> list[int]:
        names = (
            path.name.removeprefix(prefix).removesuffix(SUFFIX) for path in self._folder.glob(f"{prefix}*{SUFFIX}")
        )
        return sorted(int(name) for name in names if name.isdigit())

    def read_members(self, version: int, number: int) -> tuple[Trajectory, ...]:
        """Read a group's trajectories in a version's batch, if there; raises `CodecError`."""
        packed = next((group for group in self.unpack(version)[GROUPS] if group[NUMBER] == number), None)
        return () if packed is None else unpack_group(packed).trajectories

    def read_tokens(self, version: int) -> list[TrajectoryTokens]:
        """Read the token outcomes of a version's batch, if kept; raises `CodecError`."""
        path = self.tokens_path(version)
        try:
            return list(decode_tokens(path.read_bytes()))
        except FileNotFoundError:
            return []
        except (OSError, CodecError) as error:
            raise CodecError(f"{path} can't be read: {error}") from error

    def path(self, version: int) -> Path:
        return self._folder / f"{PREFIX}{version:06d}{SUFFIX}"

    def tokens_path(self, version: int) -> Path:
        return self._folder / f"{TOKENS}{version:06d}{SUFFIX}"

    def unpack(self, version: int) -> Sequence[Any]:
        """Read the fields of a version's batch; raises `CodecError`."""
        path = self.path(version)
        try:
            schema, recorded, *rest = msgpack.unpackb(path.read_bytes())
            if (schema, recorded) != (SCHEMA, version):
                raise CodecError(f"schema {schema}, step {recorded}")
            return rest
        except (OSError, ValueError, TypeError, msgpack.UnpackException, CodecError) as error:
            raise CodecError(f"{path} is no recorded batch: {error}") from error
