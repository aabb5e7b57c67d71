"""`python -m offbeat.deploy.local.parent_guard PARENT COMMAND ...`: command and all descendants die with PARENT."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from offbeat.deploy.local.processes import adopt_orphans, terminate_descendants
from offbeat.services.process import die_with_parent


class _ParentEndedError(Exception):
    pass


def guard_command(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "offbeat.deploy.local.parent_guard", str(os.getpid()), *command]


def guard(parent: int, command: Sequence[str]) -> int:
    """Run `command`; return its exit code, or 1 if `parent` ended first."""

    def on_signal(*_: object) -> None:
        if os.getppid() != parent:
            raise _ParentEndedError

    adopt_orphans()
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(by=signal.SIGTERM)
    try:
        on_signal()  # in case the parent ended before the death signal was set
        child = subprocess.Popen(command)
        while True:
            pid, status = os.wait()  # also reaps the command's orphans
            if pid == child.pid:
                return os.waitstatus_to_exitcode(status)
    except _ParentEndedError:
        terminate_descendants(0.0)
        return 1


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
