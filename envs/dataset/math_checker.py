"""Equality of formulas, decided in processes that can be killed.

Invariant: a comparison takes at most `CPU_S` of CPU time; past it, the answer is wrong.
"""

import os
import sys
from functools import lru_cache
from pathlib import Path

from offbeat.envs.isolation.line_process import LineProcesses

PROGRAM = Path(__file__).with_name("math_verifier.py")
CPU_S = 2.0
"""CPU time per comparison, a small part of `step_timeout_s`, as comparisons may wait for one another."""
MAX_PROCESSES = 4
MEMORY_BYTES = 2 << 30
"""Address space."""
FAILURE = "math-verify did not start or finds 1 unequal to 1: see the error above, or reinstall offbeat[data]"


class MathChecker(LineProcesses):
    """Processes of `math_verifier`, each restarted after an expensive comparison."""

    def __init__(self, num_processes: int) -> None:
        # -P: the folder's own math.py must not shadow Python's
        command = [sys.executable, "-P", "-W", "ignore", str(PROGRAM), str(CPU_S), str(MEMORY_BYTES)]
        super().__init__(command, FAILURE, num_processes)

    def is_equal(self, gold: str, answer: str) -> bool:
        """Compare two formulas; raises RuntimeError if the process can't start."""
        return self.ask([gold, answer]) is True


@lru_cache(maxsize=1)
def _checker_of(pid: int) -> MathChecker:  # noqa: ARG001  # a forked process must not share its parent's pipes
    return MathChecker(min(len(os.sched_getaffinity(0)), MAX_PROCESSES))


@lru_cache(maxsize=4096)
def is_equal(gold: str, answer: str) -> bool:
    """Return whether two formulas are equal, False past the limits; waits while all processes are busy."""
    return _checker_of(os.getpid()).is_equal(gold, answer)
