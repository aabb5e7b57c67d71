import pytest

from offbeat.envs.adapters.reasoning_gym_scorer import check_formula, evaluate


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
