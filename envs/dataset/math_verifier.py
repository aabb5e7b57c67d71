# pyright: basic
"""Program that compares formulas by math-verify, for `MathChecker`.

JSON lines: [correct answer, answer] in, a bool out; first a bool: works.

Invariant: no comparison exceeds CPU time or memory. The kernel kills the program, as big-number arithmetic can't be
interrupted by Python.
"""

import json
import logging
import math
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

FORMULA = [LatexExtractionConfig(boxed_match_priority=-1)]


def main(cpu_s: float, memory_bytes: int) -> None:
    logging.disable()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _reply(is_equal("1", "1"))  # compiles its patterns, which is not the first answer's time
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply = is_equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(reply)


def _reply(value: bool) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def is_equal(gold: str, answer: str) -> bool:
    try:
        target = parse(_delimit(answer), FORMULA, extraction_mode="first_match", parsing_timeout=None)  # type: ignore
        correct = parse(_delimit(gold), parsing_timeout=None)  # type: ignore
        return bool(correct and target and verify(correct, target, _decimals(correct[0]), timeout_seconds=None))
    except Exception:  # sympy raises anything, for anything
        return False


def _decimals(gold) -> int:
    """Return the decimals to compare: math-verify's 6, or three digits of a number below 0.001."""
    try:
        return max(6, 2 - math.floor(math.log10(abs(float(gold)))))
    except (TypeError, ValueError, OverflowError):  # no number, 0, infinity
        return 6


def _delimit(text: str) -> str:
    r"""Put a formula between dollars, before a percent sign."""
    if "\\boxed" in text or "$" in text.replace("\\$", ""):
        return text
    text = " ".join(text.split())
    bare = text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text
    return f"${bare}$" if bare == text else f"${bare}$%"


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
