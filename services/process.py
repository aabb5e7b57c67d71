"""Child processes that die with their parent, and free ports. Children import it, so it needs the standard library alone."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that sets the death signal, which `exec` preserves, and becomes the command. Not a `preexec_fn`, which is unsafe
in a process with threads."""


def die_with_parent(parent: int | None = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel signal this process when the thread that started it ends; does nothing outside Linux.

    parent: expected parent; if it has ended already, this process exits with code 1.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(by), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def die_with_this_thread(command: Sequence[str], *, by: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command line that runs `command` as a child that dies with the thread that starts it."""
    return [sys.executable, "-IS", "-c", DIE_WITH_PARENT, str(os.getpid()), str(int(by)), *command]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now; another process may take it before the caller binds it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
