"""Errors that child processes print."""

import os
import re
import stat

ERROR = re.compile(rb"^(?:\([^)]*\) )?(?:[\w.]+\.)?\w*(?:Error|Exception)\b(?:: .*)?$", re.MULTILINE)
"""Last line of a traceback; vLLM puts a process's name before it."""
REFERENCES = (b"root cause", b"stack trace")
"""Found in errors that refer to another one."""


class StandardError:
    """What this process and its children print to standard error from now on, if that is a file, as in Ray's workers."""

    def __init__(self) -> None:
        self._start = _size()

    def last_error(self) -> str | None:
        """Return the last exception of a traceback that names a cause, in one line."""
        if self._start is None:
            return None
        try:
            with open("/proc/self/fd/2", "rb") as file:
                file.seek(self._start)
                printed = file.read()
        except OSError:  # no /proc, or another user's file
            return None
        errors = [line for line in ERROR.findall(printed) if not any(each in line for each in REFERENCES)]
        return errors[-1].decode(errors="replace") if errors else None


def _size() -> int | None:
    status = os.fstat(2)
    return status.st_size if stat.S_ISREG(status.st_mode) else None
