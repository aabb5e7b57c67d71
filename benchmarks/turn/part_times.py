"""Calls, CPU and wall time of functions, in a file that other processes read.

Invariant: a file has one writing process; a part is timed on the thread that calls it, without parts inside it.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class PartTime(NamedTuple):
    calls: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def since(self, before: "PartTime") -> "PartTime":
        return PartTime(*(now - then for now, then in zip(self, before, strict=True)))


class PartTimes:
    def __init__(self, path: Path, parts: Sequence[str]) -> None:
        """Open the file, which is created with zeros if absent."""
        self._rows = {part: row for row, part in enumerate(parts)}
        shape = (len(parts), len(PartTime._fields))
        self._values = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=shape)
        self._cells: Any = self._values.data  # NumPy takes ten times as long to add to a row
        self._inner: list[list[float]] = []

    def read(self) -> dict[str, PartTime]:
        return {part: PartTime(*self._values[row].tolist()) for part, row in self._rows.items()}

    def measure(self, owner: Any, name: str, part: str) -> None:
        """Replace a synchronous function of a class or module by one that is timed."""
        setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        row, cells = self._rows[part], self._cells

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append([0.0, 0.0])
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                inner_cpu, inner_wall = self._inner.pop()
                if self._inner:
                    self._inner[-1][0] += cpu
                    self._inner[-1][1] += wall
                cells[row, 0] += 1.0
                cells[row, 1] += cpu - inner_cpu
                cells[row, 2] += wall - inner_wall

        return timed
