import itertools
import os
import signal

import pytest

from offbeat.envs.adapters.reasoning_gym_scorer import check_formula, evaluate, run_forked


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[['Q', '_'], ['_', 'Q']]", [["Q", "_"], ["_", "Q"]]),
        (" [1, -2.5, True] ", [1, -2.5, True]),
        ("((0x123 + 0x456) << 1)", 0xAF2),
        ("{'a': (1, 2)}", {"a": (1, 2)}),
    ],
)
def test_literals_and_operators_are_evaluated(text: str, value: object):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text", ["exit()", "x", "[c for c in 'ab']", "'a'.upper()", "f'{1}'", "(lambda: 1)()", "[1][0]"]
)
def test_no_other_python_is_evaluated(text: str):
    with pytest.raises(ValueError, match="not a literal"):
        evaluate(text)


@pytest.mark.parametrize(
    "text", ["(85 - 3) * 1.5", "-x**2/2 + C", "2*exp(3*x) - log(x)", "factorial(3)!", "1e-3*sin(X)", ""]
)
def test_formulas_are_parsed(text: str):
    check_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "exec(chr(97))",
        "__import__('os')",
        "x.subs",
        "'x'",
        "x[0]",
        "[x]",
        "(lambda: x)()",
        "x if y else z",
        "ｅｘｅｃ(x)",
        "x_y",
        "1 .x",
    ],
)
def test_nothing_else_is_parsed_as_a_formula(text: str):
    with pytest.raises(ValueError, match="not a formula"):
        check_formula(text)


def test_a_forked_score_past_its_cpu_time_is_none():
    assert run_forked(lambda: float(sum(itertools.repeat(1))), cpu_s=0.05) is None
    assert run_forked(lambda: 0.5, cpu_s=5.0) == {"score": 0.5}


def test_an_exception_of_a_forked_score_is_its_error():
    assert run_forked(lambda: float("x"), cpu_s=5.0) == {"error": "ValueError: could not convert string to float: 'x'"}


def test_a_forked_score_that_ends_its_process_is_none():
    assert run_forked(lambda: float(os.kill(os.getpid(), signal.SIGKILL) or 0), cpu_s=5.0) is None
