"""What a finished run was measured with.

Invariant: a run is reused only for the steps and overrides that it had.
"""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.result import build, cpu_name
from offbeat.benchmarks.peer.options import PeerError

DONE = "done"


@dataclass(frozen=True, slots=True)
class MeasuredWith:
    steps: int
    overrides: tuple[str, ...] = ()
    build: str = ""
    measured_at: str = ""
    cpu: str = ""

    @classmethod
    def now(cls, steps: int, overrides: tuple[str, ...]) -> "MeasuredWith":
        return cls(steps, overrides, build(), datetime.now(UTC).isoformat(timespec="seconds"), cpu_name())

    def write(self, folder: Path) -> None:
        (folder / DONE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @property
    def is_of_now(self) -> bool:
        return (self.build, self.cpu) == (build(), cpu_name()) and "+" not in self.build


def read_done(folder: Path, steps: int, overrides: tuple[str, ...]) -> MeasuredWith | None:
    """Return what the run in a folder was measured with; None if there is none.

    Raises:
        PeerError: with other steps or overrides, or it is not known.
    """
    try:
        stored = _parse(json.loads((folder / DONE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        stored = None
    if stored is not None and (stored.steps, stored.overrides) == (steps, overrides):
        return stored
    was = "unknown steps and --set" if stored is None else _describe(stored.steps, stored.overrides)
    raise PeerError(
        f"{folder} holds a run with {was}, not {_describe(steps, overrides)}: --fresh measures it again, another "
        "--folder keeps both"
    )


def _parse(stored: dict[str, Any]) -> MeasuredWith:
    return MeasuredWith(**{**stored, "overrides": tuple(stored["overrides"])})


def _describe(steps: int, overrides: tuple[str, ...]) -> str:
    return f"--steps {steps}" + "".join(f" --set {override}" for override in overrides)
