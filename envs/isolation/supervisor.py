"""Supervisor process of a sandboxed program, which is its child.

Invariants: the program starts only if the kernel gives every required guarantee; the supervisor, out of the program's reach,
kills it at its time limit.
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
from offbeat.envs.isolation.guarantees import missing_promises

REFUSED_EVENTS = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "pty.", "ctypes.")
MAX_THREADS = 64


def main() -> None:
    """Isolate, limit and run `main.py` of the folder in argv[1]; write `outcome.json` there."""
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    source = (folder / "main.py").read_text(encoding="utf-8", errors="surrogateescape")
    layers: list[str] = []
    program_id = _namespaces(wanted, layers)
    syscalls.die_with_parent()
    if os.getppid() != wanted["parent"]:
        os._exit(1)
    told, tell = os.pipe()
    program = os.fork()
    if program:
        os.close(tell)
        _supervise(program, folder, told, time.monotonic() + wanted["timeout_s"])
    os.close(told)
    os.setsid()
    _hold_in(folder, wanted, layers, program_id)
    missing = missing_promises(layers, one_process=wanted["max_processes"] == 1)
    started = not (wanted["required"] and missing)
    os.write(tell, json.dumps({"layers": layers, "started": started}).encode())
    os.close(tell)
    if not started:
        os._exit(1)
    if missing:
        sys.addaudithook(_refuse)
    sys.argv = ["main.py"]
    _run(source)


def _namespaces(wanted: dict[str, Any], layers: list[str]) -> int:
    if "namespaces" not in wanted["layers"]:
        return 0
    try:
        program_id = namespaces.enter()
    except OSError:
        return 0
    layers.append("namespaces")
    return program_id


def _hold_in(folder: Path, wanted: dict[str, Any], layers: list[str], program_id: int) -> None:
    """Apply each requested layer that the kernel offers, outermost first."""
    offered, work = wanted["layers"], str(folder / "work")
    readable, one_process = _readable(), wanted["max_processes"] == 1
    own_pid = None if "namespaces" in layers else os.getpid()

    def new_root() -> None:
        sizes = {"disk_mib": wanted["disk_mib"], "max_files": wanted["max_files"]}
        namespaces.new_root(folder, readable, program_id=program_id, **sizes)

    if "mounts" in offered and "namespaces" in layers and _held(new_root):
        layers.append("mounts")
        work = namespaces.WORK
    os.chdir(work)
    os.environ.update(HOME=work, TMPDIR=work)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if program_id and "mounts" in layers:
        namespaces.become(program_id)
    syscalls.drop_capabilities()
    _limit(wanted)
    allowed = [work, *namespaces.DEVICES]
    if "landlock" in offered and _held(lambda: landlock.restrict(readable=readable, writable=allowed)):
        layers.append("landlock")
    syscalls.die_with_parent()
    if "seccomp" in offered and _held(lambda: seccomp.restrict(one_process=one_process, own_pid=own_pid)):
        layers.append("seccomp")


def _held(layer: Any) -> bool:
    try:
        layer()
    except OSError:
        return False
    return True


def _readable() -> list[str]:
    """Return the paths that Python and its libraries read, the interpreter's own folders last."""
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    return [*system, *dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))]


def _limit(wanted: dict[str, Any]) -> None:
    mib, processes = 1 << 20, wanted["max_processes"]
    memory = wanted["memory_mib"] * mib // processes
    for name, soft, hard in (
        (resource.RLIMIT_CPU, wanted["cpu_s"], wanted["cpu_s"] + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, wanted["file_mib"] * mib, wanted["file_mib"] * mib),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_NPROC, *(2 * (MAX_THREADS if processes == 1 else processes,))),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def _supervise(program: int, folder: Path, told: int, deadline: float) -> None:
    """Wait for the program or kill it at the deadline, then exit; its namespace dies with it."""
    status, timed_out = None, False
    while status is None:
        done, status = os.waitpid(program, os.WNOHANG)
        if not done:
            status = None
            if time.monotonic() > deadline and not timed_out:
                timed_out = True
                os.kill(program, signal.SIGKILL)
            time.sleep(0.002)
    isolation = json.loads(os.read(told, 1 << 16) or b'{"layers": [], "started": true}')
    outcome = {"exit_code": os.waitstatus_to_exitcode(status), "timed_out": timed_out, **isolation}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    os._exit(0)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith(REFUSED_EVENTS):
        raise PermissionError(f"{event} is not allowed here")


def _run(source: str) -> None:
    try:
        exec(compile(source, "main.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit:
        raise
    except BaseException as error:
        # Our own frame is not the program's business.
        below = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, below)
        sys.exit(1)
