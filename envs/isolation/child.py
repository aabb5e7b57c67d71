"""What runs inside the sandbox, started by `envs.sandbox.running` with a folder and limits; imports the library alone."""

import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

NEW_USER, NEW_PID, NEW_NET, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "pty.", "ctypes.")


def main() -> None:
    """Isolate, limit, run `main.py`, end as it ends."""
    folder, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
    source = (folder / "main.py").read_text(encoding="utf-8", errors="surrogateescape")
    libc = ctypes.CDLL(None, use_errno=True)
    isolated = libc.unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC) == 0
    (folder / "isolation").write_text("namespaces" if isolated else "audit")
    child = os.fork()
    if child:
        _wait(child, time.monotonic() + limits["timeout_s"])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _limit(limits)
    if not isolated:
        sys.addaudithook(_refuse)
    sys.argv = ["main.py"]
    _run(source)


def _wait(child: int, deadline: float) -> None:
    """End as the program ends, whose death takes its whole namespace along."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
                os.kill(os.getpid(), -code)
            os._exit(code)
        time.sleep(0.002)
    signal.pause()


def _limit(limits: dict[str, Any]) -> None:
    mib = 1 << 20
    for name, soft, hard in (
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib, limits["memory_mib"] * mib),
        (resource.RLIMIT_FSIZE, limits["file_mib"] * mib, limits["file_mib"] * mib),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_NPROC, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith(REFUSED):
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


if __name__ == "__main__":
    main()
