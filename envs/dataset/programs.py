"""Made programming tasks for `pipeline: rlvr`, as JSONL: `python -m offbeat.envs.dataset.programs OUT.jsonl [--held-out]`.

A task is a function of three steps, such as `add 3 , multiply 2 , subtract 1`; one in 48 is held out. Words are separated
by spaces, for the tiny policy's tokenizer, so a program is one line: `def f ( x ) : return ( ( x + 3 ) * 2 ) - 1`. Tasks
whose program is right without brackets are left out.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from offbeat.envs.dataset.arithmetic import is_held_out, run_command

SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}
NUMBERS = range(2, 8)
NUM_STEPS = 3
INPUTS = (2, 9)
"""Of the tests."""
HELD_OUT_SHARE = 48
"""Inverse share of tasks."""

Steps = Sequence[tuple[str, int]]


def tasks(*, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield a split's tasks, with tests that fail a program without brackets (column `careless`)."""
    for steps in product(product(SIGNS, NUMBERS), repeat=NUM_STEPS):
        prompt = " , ".join(f"{name} {number}" for name, number in steps)
        outputs = [_in_order(steps, x) for x in INPUTS]
        needs_brackets = all(_by_precedence(steps, x) != y for x, y in zip(INPUTS, outputs, strict=True))
        if needs_brackets and is_held_out(prompt, HELD_OUT_SHARE) == held_out:
            yield {
                "id": prompt,
                "prompt": prompt,
                "test_cases": {"fn_name": "f", "inputs": [[x] for x in INPUTS], "outputs": outputs},
                "response": _define(steps, brackets=True),
                "careless": _define(steps, brackets=False),
            }


def _in_order(steps: Steps, x: int) -> int:
    for name, number in steps:
        x = {"add": x + number, "subtract": x - number, "multiply": x * number}[name]
    return x


def _by_precedence(steps: Steps, x: int) -> int:
    total, term = 0, x
    for name, number in steps:
        if name == "multiply":
            term *= number
        else:
            total, term = total + term, number if name == "add" else -number
    return total + term


def _define(steps: Steps, *, brackets: bool) -> str:
    expression = "x"
    for at, (name, number) in enumerate(steps):
        operand = f"( {expression} )" if brackets and at else expression
        expression = f"{operand} {SIGNS[name]} {number}"
    return f"def f ( x ) : return {expression}"


if __name__ == "__main__":
    run_command(__doc__ or "", tasks)
