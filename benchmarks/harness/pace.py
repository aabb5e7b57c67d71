"""Steps of a child process at its parent's pace: `READY`; per input line a step, then `STEP` and a JSON object.

Invariant: the child imports only the standard library until a step is measured on CUDA.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

READY, STEP = "READY", "STEP"


class PacedSideError(Exception):
    """Early exit of a side."""


class Pace:
    """The child's part: time and peak memory of its steps."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if not self._cuda:  # what imports took and gave back is no part of a step
            Path("/proc/self/clear_refs").write_text("5")
        self._start = self._peak()
        self._began = 0.0

    def ready(self) -> None:
        print(READY, flush=True)  # noqa: T201

    def before(self) -> None:
        """Wait for a line; exit at end of input."""
        if not sys.stdin.readline():
            sys.exit(0)
        self._began = time.perf_counter()

    def after(self, **measured: float) -> None:
        seconds = time.perf_counter() - self._began
        step = {"seconds": seconds, "bytes": self._peak() - self._start, **measured}
        print(STEP, json.dumps(step), flush=True)  # noqa: T201

    @contextmanager
    def step(self) -> Iterator[None]:
        self.before()
        yield
        self.after()

    def _peak(self) -> int:
        if self._cuda:
            import torch

            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])


class PacedProcess:
    """The parent's part. name: for errors."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = folder / f"{name}.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> "PacedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        self._read(READY)

    def step(self) -> dict[str, Any]:
        """Return a step's measures."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is reported below
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return json.loads(self._read(STEP))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self, word: str) -> str:
        """Return the rest of the next `word` line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        tail = self._log.read_text().strip().splitlines()[-3:]
        code = self._process.wait()
        raise PacedSideError(f"{self._name} ended early ({code}): {' '.join(cast(list[str], tail))}")
