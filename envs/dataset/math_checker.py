"""Equality of formulas, decided in a process that can be killed.

Invariant: a comparison takes at most `CPU_S` of CPU time; past it, the answer is wrong.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

PROGRAM = Path(__file__).with_name("math_verifier.py")
CPU_S = 2.0
"""CPU time per comparison."""
MEMORY_BYTES = 2 << 30
"""Address space."""


class MathChecker:
    """A process of `math_verifier`, restarted after an expensive comparison."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, gold: str, answer: str) -> bool:
        """Compare two formulas; raises RuntimeError if the process can't start."""
        with self._lock:
            process = self._process = self._process or _start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps([gold, answer]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = ""
            if reply:
                return json.loads(reply)
            self._stop()
            return False

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass


def _start() -> "subprocess.Popen[str]":
    # -P: the folder's own math.py must not shadow Python's
    command = [sys.executable, "-P", "-W", "ignore", str(PROGRAM), str(CPU_S), str(MEMORY_BYTES)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    if process.stdout.readline() == "true\n":
        return process
    process.kill()
    with process:
        raise RuntimeError(
            "math-verify did not start or finds 1 unequal to 1: see the error above, or reinstall offbeat[data]"
        )


@lru_cache(maxsize=1)
def _checker_of(pid: int) -> MathChecker:  # noqa: ARG001  # a forked process must not share its parent's pipes
    checker = MathChecker()
    atexit.register(checker.close)
    return checker


@lru_cache(maxsize=4096)
def is_equal(gold: str, answer: str) -> bool:
    """Return whether two formulas are equal, False past the limits; sequential."""
    return _checker_of(os.getpid()).is_equal(gold, answer)
