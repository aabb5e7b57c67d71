"""Supervisor process, parent of a sandboxed program.

Invariants: the program starts only with every required guarantee; the supervisor, out of its reach, kills it at its
time limit.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from offbeat.envs.isolation import (
    landlock,
    namespaces,
    seccomp,
    syscalls,
)
from offbeat.envs.isolation.guarantees import missing_guarantees

BLOCKED_EVENTS = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "pty.", "ctypes.")
MAX_THREADS = 64
KILL_POLL_S = 0.002


def main() -> None:
    """Isolate, limit and run argv[1]'s `main.py`; write `outcome.json` there."""
    folder, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    source = (folder / "main.py").read_text(encoding="utf-8", errors="surrogateescape")
    layers: list[str] = []
    program_id = _enter_namespaces(request, layers)
    syscalls.die_with_parent()
    if os.getppid() != request["parent"]:
        os._exit(1)
    read_end, write_end = os.pipe()
    program = os.fork()
    if program:
        os.close(write_end)
        _supervise(program, folder, read_end, time.monotonic() + request["timeout_s"])
    os.close(read_end)
    os.setsid()
    _confine(folder, request, layers, program_id)
    missing = missing_guarantees(layers, one_process=request["max_processes"] == 1)
    started = not (request["required"] and missing)
    os.write(write_end, json.dumps({"layers": layers, "started": started}).encode())
    os.close(write_end)
    if not started:
        os._exit(1)
    if missing:
        sys.addaudithook(_refuse)
    sys.argv = ["main.py"]
    _run(source)


def _enter_namespaces(request: dict[str, Any], layers: list[str]) -> int:
    if "namespaces" not in request["layers"]:
        return 0
    try:
        program_id = namespaces.enter()
    except BlockingIOError:  # no process is left
        raise
    except OSError:
        return 0
    layers.append("namespaces")
    return program_id


def _confine(folder: Path, request: dict[str, Any], layers: list[str], program_id: int) -> None:
    """Apply requested layers that the kernel offers, outermost first."""
    requested, work = request["layers"], str(folder / "work")
    readable, one_process = [*_readable_paths(), *request["readable"]], request["max_processes"] == 1
    own_pid = None if "namespaces" in layers else os.getpid()

    def new_root() -> None:
        names = ("hidden", "writable", "disk_mib", "max_files")
        namespaces.new_root(folder, readable, program_id=program_id, **{name: request[name] for name in names})

    if "mounts" in requested and "namespaces" in layers and _apply(new_root):
        layers.append("mounts")
        work = namespaces.WORK
    os.chdir(work)
    os.environ.update(HOME=work, TMPDIR=work)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if program_id and "mounts" in layers:
        namespaces.switch_user(program_id)
    syscalls.drop_capabilities()
    _set_limits(request)
    allowed = [work, *namespaces.DEVICES, *(request["writable"] if "mounts" in layers else ())]
    files = seccomp.Files(metadata="mounts" in layers, truncation="mounts" in layers)

    def restrict_files() -> None:
        nonlocal files
        abi = landlock.restrict(readable=readable, writable=allowed, max_abi=request["max_landlock_abi"])
        files = files._replace(truncation=files.truncation or abi >= landlock.TRUNCATE_SINCE)

    if "landlock" in requested and _apply(restrict_files):
        layers.append("landlock")
    syscalls.die_with_parent()
    if "seccomp" in requested and _apply(
        lambda: seccomp.restrict(one_process=one_process, own_pid=own_pid, files=files)
    ):
        layers.append("seccomp")


def _apply(layer: Any) -> bool:
    try:
        layer()
    except OSError:
        return False
    return True


def _readable_paths() -> list[str]:
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    return [*system, *dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))]


def _set_limits(request: dict[str, Any]) -> None:
    mib, processes = 1 << 20, request["max_processes"]
    memory = request["memory_mib"] * mib // processes
    for name, soft, hard in (
        (resource.RLIMIT_CPU, request["cpu_s"], request["cpu_s"] + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, request["file_mib"] * mib, request["file_mib"] * mib),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_NPROC, *(2 * (MAX_THREADS if processes == 1 else processes,))),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def _supervise(program: int, folder: Path, read_end: int, deadline: float) -> None:
    """Wait for the program or kill it at the deadline, then exit."""
    status, timed_out = None, False
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while status is None:
        done, status = os.waitpid(program, os.WNOHANG)
        if not done:
            status = None
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 and not timed_out:
                timed_out = True
                os.kill(program, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, max(remaining_s, KILL_POLL_S))
    message = os.read(read_end, 1 << 16)
    if not message and not timed_out:  # it ended before the program's first line
        os._exit(1)
    isolation = json.loads(message or b'{"layers": [], "started": true}')
    outcome = {"exit_code": os.waitstatus_to_exitcode(status), "timed_out": timed_out, **isolation}
    (folder / "outcome.part").write_text(json.dumps(outcome))  # may be killed while it writes
    (folder / "outcome.part").rename(folder / "outcome.json")
    os._exit(0)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith(BLOCKED_EVENTS):
        raise PermissionError(f"{event} is not allowed here")


def _run(source: str) -> None:
    try:
        exec(compile(source, "main.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit:
        raise
    except BaseException as error:
        # Leave this function's frame out.
        below = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, below)
        sys.exit(1)
