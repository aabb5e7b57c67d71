"""`python -m offbeat.deploy.local.parent_guard PARENT COMMAND ...`: the command's process tree ends with process PARENT.

Invariants: when the parent ends, however that comes about, every descendant of the command is killed, also one whose own
parent has died before it could be told of anything; while the parent lives, ending them is the parent's to do.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from offbeat.deploy.local.processes import adopt_orphans, end_descendants
from offbeat.services.process import die_with_parent


class _ParentEndedError(Exception):
    pass


def guarded(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` under a guard; what the guard dies with is the thread that starts it."""
    return [sys.executable, "-m", "offbeat.deploy.local.parent_guard", str(os.getpid()), *command]


def guard(parent: int, command: Sequence[str]) -> int:
    """Run `command` and return its exit code; 1 if the process `parent` ended first."""

    def on_signal(*_: object) -> None:
        if os.getppid() != parent:
            raise _ParentEndedError

    adopt_orphans()
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(by=signal.SIGTERM)
    try:
        on_signal()  # it may have ended before it could be watched
        child = subprocess.Popen(command)
        while True:
            pid, status = os.wait()  # orphans of the command's are ours to wait for as well
            if pid == child.pid:
                return os.waitstatus_to_exitcode(status)
    except _ParentEndedError:
        end_descendants(0.0)
        return 1


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
