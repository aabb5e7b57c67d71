"""A program in a process of its own: limits on time, CPU, memory, files and output, no network, an empty folder.

Invariants: nothing of it runs on after `run_python` returns; its environment holds no variable of ours. Where the kernel
gives user namespaces it sees no network and no process but its own; where it does not (many containers), Python's audit
hooks refuse sockets and new processes, which stops ordinary code but no attacker. Files that its user can read can be read
in both cases.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from envs.config import Config

CHILD = Path(__file__).with_name("child.py")
GRACE_S = 1.0
"""Beyond the program's own time, for the interpreter to start and end."""


class Limits(Config):
    """What a program may use."""

    timeout_s: float = Field(default=5.0, gt=0)
    cpu_s: int = Field(default=5, ge=1)
    memory_mib: int = Field(default=512, ge=64)
    file_mib: int = Field(default=8, ge=1)
    """Largest file that it may write; of its output too."""
    max_output_chars: int = Field(default=10_000, ge=1)
    """Of stdout and of stderr, each cut at its middle."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that killed it."""
    timed_out: bool
    isolation: Literal["namespaces", "audit", "none"]
    """`none`: it did not get as far as being isolated."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def error(self) -> str:
        """The last line of what went wrong, empty if nothing did."""
        if self.timed_out:
            return "out of time"
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return "" if self.ok else lines[-1] if lines else f"exit code {self.exit_code}"


def run_python(code: str, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a program to its end, or to that of its time."""
    limits = limits or Limits()
    folder = Path(tempfile.mkdtemp(prefix="offbeat-sandbox-"))
    try:
        work = folder / "work"
        work.mkdir()
        (folder / "main.py").write_text(code, encoding="utf-8", errors="surrogateescape")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        exit_code, timed_out = _run(folder, work, limits)
        kind = (folder / "isolation").read_text() if (folder / "isolation").is_file() else "none"
        out, err = (_read(folder / name, limits.max_output_chars) for name in ("stdout", "stderr"))
        return Outcome(out, err, exit_code, timed_out, kind)  # pyright: ignore[reportArgumentType]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, work: Path, limits: Limits) -> tuple[int, bool]:
    command = [sys.executable, "-I", str(CHILD), str(folder), json.dumps(limits.model_dump())]
    environment = {
        "PATH": os.defpath,
        "HOME": str(work),
        "TMPDIR": str(work),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    with (
        (folder / "stdin").open("rb") as given,
        (folder / "stdout").open("wb") as out,
        (folder / "stderr").open("wb") as err,
    ):
        process = subprocess.Popen(
            command, stdin=given, stdout=out, stderr=err, cwd=work, env=environment, start_new_session=True
        )
        try:
            return process.wait(limits.timeout_s + GRACE_S), False
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, True
        finally:
            _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The whole session; in namespaces, all that left it dies with the first process in there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path, limit: int) -> str:
    with path.open("rb") as file:
        text = file.read(16 * limit).decode(errors="replace")
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
