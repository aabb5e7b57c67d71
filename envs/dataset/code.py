"""Programming tasks, scored by tests in the sandbox."""

import ast
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, field_validator

from offbeat.envs.dataset.env import (
    Judgement,
    QuestionEnv,
    QuestionsConfig,
    last_group,
)
from offbeat.envs.dataset.program_checker import CallTest, check_output, check_program, run_tests
from offbeat.envs.dataset.rows import Row
from offbeat.envs.parsing import compile_pattern, fenced_pattern
from offbeat.envs.sandbox import Limits, check_isolation

FENCED = fenced_pattern("python3?|py3?")

Test = tuple[str | CallTest, str, str | None]
"""Code after the program, or call; stdin; expected stdout."""


class CodeConfig(QuestionsConfig):
    """`answer_key` names the column of tests: `assert` lines (MBPP) or `{"inputs": [...], "outputs": [...]}` of stdin and
    stdout or, with `fn_name`, of calls (APPS), as a value or JSON text.
    """

    answer_key: str = "tests"
    answer_pattern: str = FENCED
    """Regular expression of the program; the last match counts."""
    reward: Literal["binary", "pass_rate"] = "binary"
    """1 if all tests pass, or the share that passes."""
    sandbox: Limits = Limits()
    """Limits per test."""
    max_tests: int | None = Field(default=None, ge=1)
    """Maximum tests, from the first."""
    max_total_s: float = Field(default=20.0, gt=0)
    """Time, s, for the tests of a program that has failed one by its time limit; those that could take longer count as
    failed.
    """

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    @property
    def longest_s(self) -> float:
        """Return the longest time of tests that all run out of time."""
        timeout_s = self.sandbox.timeout_s
        all_s = math.inf if self.max_tests is None else self.max_tests * timeout_s
        return max(timeout_s, min(self.max_total_s, all_s))


class CodeEnv(QuestionEnv[CodeConfig]):
    """A programming task; reward 1 for a fenced program that passes all tests."""

    config_class: ClassVar[type[CodeConfig]] = CodeConfig
    system_prompt: str = "Write a Python program that does what is asked, in a fenced block."

    def __init__(self, config: CodeConfig) -> None:
        check_isolation(config.sandbox)
        super().__init__(config)

    def judge(self, row: Row, answer: str) -> Judgement:
        program = last_group(self.config.answer_pattern, answer)
        if program is None:
            return Judgement(0.0, success=False, valid=False, metrics={"pass_rate": 0.0})
        tests = read_tests(row[self.config.answer_key])[: self.config.max_tests]
        limits, max_total_s = self.config.sandbox, self.config.max_total_s
        errors = list(run_tests(tests, partial(self._run_test, program), bool, limits, max_total_s))
        first = next(filter(None, errors), "")
        rate = errors.count("") / len(tests)
        reward = rate if self.config.reward == "pass_rate" else float(not first)
        return Judgement(reward, not first, True, first, {"pass_rate": rate})

    def _run_test(self, program: str, test: Test, limits: Limits) -> str:
        """Return the error; empty if passed."""
        extra, stdin, expected = test
        if expected is not None:
            return check_output(program, stdin, expected, limits)
        return check_program(program, extra, limits)


def read_tests(tests: Any) -> list[Test]:
    """Return a row's tests; raises ValueError without any, or for one that no program could fail."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    parsed: list[Test]
    if isinstance(tests, Mapping):
        table = cast(Mapping[str, Any], tests)
        name = table.get("fn_name")
        pairs = zip(table["inputs"], table["outputs"], strict=True)
        if name:
            parsed = [(read_call(str(name), arguments, out, unwraps=True), "", None) for arguments, out in pairs]
        else:
            parsed = [("", lines_of(test_input), lines_of(out)) for test_input, out in pairs]
    else:
        parsed = [(code, "", None) for code in drop_empty(map(str, cast(Sequence[object], tests)))]
        for code, *_ in parsed:
            refuse_definitions(str(code))
    if not parsed:
        raise ValueError("the task has no tests: each row needs at least one")
    return parsed


def drop_empty(tests: Iterable[str]) -> list[str]:
    """Leave out lines of a test's text that have no statement, such as comments."""
    return [
        test for test in tests if any(line.strip() and not line.strip().startswith("#") for line in test.splitlines())
    ]


def refuse_definitions(code: str) -> None:
    """Raise ValueError for a test that only defines, such as `def check(candidate): ...` without its call."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return  # it fails when it runs
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [node for each in statements if not isinstance(each, definitions) for node in ast.walk(each)]
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes):
        raise ValueError(f"a test asserts and calls nothing, so that it tests no program: {code.strip()[:80]!r}")


def lines_of(value: Any) -> str:
    """Return stdin or stdout, which may be a list of lines."""
    return "\n".join(map(str, cast(list[object], value))) if isinstance(value, list) else str(value)


def read_call(name: str, arguments: Any, output: Any, *, unwraps: bool) -> CallTest:
    """Return a test of one call; `Class.f` is a method. Raises ValueError.

    arguments: a list, or text with a JSON value per line, as the output then is JSON. unwraps: whether a list of one
    output is also that output, as in APPS' rows (and its `testing_util.py`).
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no function's name")
    if isinstance(arguments, str):
        values = [json.loads(line) for line in arguments.splitlines()]
        return CallTest(name, values, [json.loads(output) if isinstance(output, str) else output])
    if isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} are named: give a list, in the order of its parameters")
    is_wrapped = unwraps and isinstance(output, list) and len(cast(list[Any], output)) == 1
    return CallTest(name, list(arguments), [output, output[0]] if is_wrapped else [output])
