"""Untrusted programs with limits on time, CPU, memory, files and output, without network, in an empty folder.

Invariants: no process survives `run_python`; no environment variables are inherited; with `isolation: require` the
kernel confines the program from network, other processes and foreign files.
"""

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

import offbeat
from offbeat.envs.config import Config
from offbeat.envs.isolation.guarantees import missing_guarantees
from offbeat.envs.sandbox.folder import SandboxFolder
from offbeat.envs.sandbox.pipes import close_all, closing_on_error

logger = logging.getLogger(__name__)

Layer = Literal["namespaces", "mounts", "landlock", "seccomp"]
LAYERS: tuple[Layer, ...] = ("namespaces", "mounts", "landlock", "seccomp")
ROOT = str(Path(offbeat.__file__).parent.parent)
SUPERVISOR_CODE = (
    f"import sys; sys.path.insert(0, {ROOT!r}); "
    "from offbeat.envs.isolation.supervisor import main; del sys.path[0]; main()"
)
STARTUP_TIMEOUT_S = 30.0
"""Of the supervisor, not counted as the program's time."""
STOP_POLL_S = 0.01


REQUIREMENTS = {
    "the network": "user namespaces or seccomp",
    "other processes": "user namespaces or seccomp",
    "files that are not theirs": "mounts in a user namespace, or Landlock with seccomp",
}


class IsolationError(ValueError):
    """Missing required guarantee; nothing was run."""


class Limits(Config):
    timeout_s: float = Field(default=5.0, gt=0)
    cpu_s: int = Field(default=5, ge=1)
    memory_mib: int = Field(default=512, ge=64)
    """Address space, divided among `max_processes`."""
    file_mib: int = Field(default=8, ge=1)
    """Largest file, including stdout and stderr."""
    disk_mib: int = Field(default=64, ge=1)
    """Total file size, in memory; needs mounts."""
    max_files: int = Field(default=1000, ge=10)
    """Files and folders; needs mounts."""
    max_processes: int = Field(default=1, ge=1)
    """1: no child processes, up to 64 threads. More: processes plus threads; needs namespaces."""
    max_output_chars: int = Field(default=10_000, ge=1)
    """Length of stdout and of stderr; the middle is cut."""
    isolation: Literal["require", "warn"] = "require"
    """Without kernel isolation: refuse, or warn and use Python's audit hooks, which stop no attacker."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    stdout: str
    stderr: str
    exit_code: int
    """Negative: signal number."""
    timed_out: bool
    layers: tuple[Layer, ...]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def error(self) -> str:
        """Return the error's last line, if any."""
        if self.timed_out:
            return "out of time"
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return "" if self.ok else lines[-1] if lines else f"exit code {self.exit_code}"


def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    layers: tuple[Layer, ...] = LAYERS,
    pass_fds: tuple[int, ...] = (),
    stop: threading.Event | None = None,
    max_landlock_abi: int | None = None,
) -> ProgramResult:
    """Run a program until it exits or times out.

    layers: used if the kernel offers them. pass_fds: passed, and closed here in any case. stop: kills the program when set.
    max_landlock_abi: emulates an older kernel's Landlock.

    Raises:
        IsolationError: a required guarantee is missing.
        OSError: the supervisor failed, which is no verdict on the program.
    """
    limits = limits or Limits()
    with closing_on_error(pass_fds):
        temporary = _write_folder(code, stdin)
    folder = temporary.path
    try:
        has_ended = _run(folder, limits, layers, pass_fds, stop, max_landlock_abi)
        out, err = (_read(folder / name, limits.max_output_chars) for name in ("stdout", "stderr"))
        if not (folder / "outcome.json").is_file():
            if has_ended:
                reason = ProgramResult(out, err, 1, False, ()).error
                raise OSError(f"the sandbox's supervisor ended without a result: {reason}")
            return ProgramResult(out, err, -signal.SIGKILL, True, ())
        outcome = json.loads((folder / "outcome.json").read_text())
        if outcome["started"]:
            _warn_once(tuple(describe_missing(outcome["layers"])))
        else:
            check_isolation(limits, tuple(outcome["layers"]))
        return ProgramResult(out, err, outcome["exit_code"], outcome["timed_out"], tuple(outcome["layers"]))
    finally:
        temporary.remove()


def _write_folder(code: str, stdin: str) -> SandboxFolder:
    temporary = SandboxFolder()
    try:
        (temporary.path / "work").mkdir()
        (temporary.path / "main.py").write_text(code, encoding="utf-8", errors="surrogateescape")
        (temporary.path / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
    except BaseException:
        temporary.remove()
        raise
    return temporary


def describe_sandbox() -> str:
    """Describe this process's isolation; empty before the first program."""
    if not platform_isolation.cache_info().currsize:
        return ""
    layers = platform_isolation()
    missing = "; ".join(describe_missing(layers))
    return f"confined by {', '.join(layers) or 'Python alone'}" + (f"; not confined from {missing}" if missing else "")


@functools.cache
def platform_isolation() -> tuple[Layer, ...]:
    """Return the layers that the kernel offers. Raises OSError if an empty program does not end well."""
    result = run_python("", limits=Limits(isolation="warn", timeout_s=60.0))
    if not result.ok:
        raise OSError(f"an empty program in the sandbox did not end well: {result.error}; is the machine overloaded?")
    return result.layers


def describe_missing(layers: tuple[Layer, ...]) -> list[str]:
    missing = [f"{guarantee} ({REQUIREMENTS[guarantee]})" for guarantee in missing_guarantees(layers, one_process=True)]
    return (
        missing if "mounts" in layers else [*missing, "filling the disk with many files (mounts in a user namespace)"]
    )


def check_isolation(limits: Limits, layers: tuple[Layer, ...] | None = None) -> None:
    """Raise `IsolationError`, or warn once, if programs can't be isolated.

    layers: None probes the kernel; raises OSError if that fails.
    """
    layers = platform_isolation() if layers is None else layers
    if limits.isolation == "require" and missing_guarantees(layers, one_process=True):
        raise IsolationError(
            f"this machine can't confine programs from {'; '.join(describe_missing(layers))}: its kernel or container lacks "
            "the features in parentheses. Set `isolation: warn` to run programs without them"
        )
    if limits.isolation == "require" and missing_guarantees(layers, one_process=limits.max_processes == 1):
        raise IsolationError(
            f"max_processes: {limits.max_processes} needs user namespaces, which this machine lacks; set it to 1"
        )
    _warn_once(tuple(describe_missing(layers)))


@functools.cache
def _warn_once(missing: tuple[str, ...]) -> None:
    if missing:
        logger.warning("sandbox: this machine does not confine programs from %s", "; ".join(missing))


def _run(
    folder: Path,
    limits: Limits,
    layers: tuple[Layer, ...],
    pass_fds: tuple[int, ...],
    stop: threading.Event | None,
    max_landlock_abi: int | None,
) -> bool:
    """Return whether the supervisor ended by itself."""
    process = start_supervisor(folder, limits, layers, pass_fds, max_landlock_abi=max_landlock_abi)
    try:
        return _wait(process, limits.timeout_s + STARTUP_TIMEOUT_S, stop)
    finally:
        # The supervisor, whose death kills the program, whose death kills all in its namespace.
        process.kill()
        process.wait()


def start_supervisor(
    folder: Path,
    limits: Limits,
    layers: tuple[Layer, ...],
    pass_fds: tuple[int, ...],
    *,
    writable: tuple[str, ...] = (),
    readable: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (),
    max_landlock_abi: int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `folder`'s `main.py`, which ends with the calling thread; close `pass_fds` here, also if it fails.

    writable: empty folders at absolute paths; needs mounts. readable: files and folders besides the system's. hidden:
    folders that are empty inside; needs mounts.
    """
    request = limits.model_dump() | {"layers": layers, "parent": os.getpid(), "required": limits.isolation == "require"}
    request |= {"max_landlock_abi": max_landlock_abi, "writable": writable, "readable": readable, "hidden": hidden}
    command = [sys.executable, "-I", "-c", SUPERVISOR_CODE, str(folder), json.dumps(request)]
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        with (
            (folder / "stdin").open("rb") as program_input,
            (folder / "stdout").open("wb") as out,
            (folder / "stderr").open("wb") as err,
        ):
            return subprocess.Popen(
                command,
                stdin=program_input,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=environment,
                start_new_session=True,
                pass_fds=pass_fds,
            )
    finally:
        close_all(pass_fds)


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float, stop: threading.Event | None) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not (stop and stop.is_set()):
        try:
            process.wait(timeout_s if stop is None else STOP_POLL_S)
            return True
        except subprocess.TimeoutExpired:
            continue
    return False


def _read(path: Path, limit: int) -> str:
    size, room = path.stat().st_size, 4 * limit  # bytes of characters
    with path.open("rb") as file:
        if size <= 2 * room:
            return join_output(file.read(), b"", 0, limit)
        head = file.read(room)
        file.seek(size - room)
        return join_output(head, file.read(room), size - 2 * room, limit)


def join_output(head: bytes, tail: bytes, num_dropped: int, max_chars: int) -> str:
    """Decode a program's output, with the middle cut."""
    if not num_dropped:
        text = (head + tail).decode(errors="replace")
        if len(text) <= max_chars:
            return text
        half = max_chars // 2
        return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"
    half = max_chars // 2
    first, last = head.decode(errors="replace"), tail.decode(errors="replace")
    return f"{first[:half]}\n... more than {num_dropped} bytes left out ...\n{last[len(last) - half :]}"
