"""Tests of programming tasks, in the forms of published datasets."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from offbeat.envs.dataset.code import drop_empty, lines_of, read_call, refuse_definitions
from offbeat.envs.dataset.program_checker import CallTest
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.config import CodeSandboxConfig
from offbeat.services.reward.sample import RewardSample

CASE_TYPES = {"input": "stdio", "stdin": "stdio", "text": "assert", "check_based": "assert", "functional": "function"}
"""ROLL's and LiveCodeBench's names."""
KINDS = ("stdio", "assert", "pytest", "function")
INPUT_KEYS, OUTPUT_KEYS = ("input", "stdin", "inputs"), ("output", "expected_output", "outputs", "expected")
FUNCTION_KEYS = ("fn_name", "entry_point", "function")


@dataclass(frozen=True, slots=True)
class StdioCase:
    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Code after the program."""

    code: str


@dataclass(frozen=True, slots=True)
class PytestFile:
    source: str


Case = StdioCase | AssertCase | CallTest | PytestFile


def read_cases(sample: RewardSample, config: CodeSandboxConfig) -> list[Case]:
    """Return the row's tests; raises RewardError if there are none of a known form."""
    tests = sample.row.get(config.tests_key)
    try:
        value = _decode(sample.ground_truth if tests is None else tests)
        cases = list(_cases(value, _kind(sample, config, value), sample))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RewardError(Failure.BAD_ROW, f"{config.tests_key}: {error}") from error
    if not cases:
        raise RewardError(Failure.BAD_ROW, f"there are no tests in the column {config.tests_key!r} or ground_truth")
    return cases[: config.max_tests]


def _decode(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _kind(sample: RewardSample, config: CodeSandboxConfig, value: Any) -> str:
    named = config.case_type if config.case_type != "auto" else sample.row.get("case_type")
    if named is not None:
        kind = CASE_TYPES.get(str(named), str(named))
        if kind not in KINDS:
            raise ValueError(f"the case_type {named!r} is none of {', '.join(KINDS)}")
        return kind
    if isinstance(value, str):
        return "pytest" if "def test_" in value else "assert"
    first = value[0] if isinstance(value, Sequence) and value else value
    if isinstance(first, str):
        return "pytest" if any(map(_has_uncalled_test, value)) else "assert"
    if not isinstance(first, Mapping):
        return "assert"
    return "function" if _function_name(first, sample) else "stdio"


def _cases(value: Any, kind: str, sample: RewardSample) -> Iterator[Case]:
    match kind:
        case "pytest":
            yield from map(_pytest_file, drop_empty(map(_python, [value] if isinstance(value, str) else value)))
        case "assert":
            for code in drop_empty(map(_python, [value] if isinstance(value, str) else value or ())):
                refuse_definitions(code)
                yield from map(AssertCase, _assertions(code))
        case "stdio":
            for test_input, output in _pairs(value):
                yield StdioCase(lines_of(test_input), lines_of(output))
        case _:
            name = _function_name(value if isinstance(value, Mapping) else value[0], sample)
            if not name:
                raise ValueError(f"a function's cases need its name, as one of {', '.join(FUNCTION_KEYS)}")
            for arguments, output in _pairs(value):
                yield read_call(name, arguments, output, unwraps=isinstance(value, Mapping))


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and outputs of `{"inputs": [...], "outputs": [...]}`, or of a list of objects."""
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        yield from zip(_item(table, INPUT_KEYS[::-1]), _item(table, OUTPUT_KEYS), strict=True)
        return
    for each in value:
        yield _item(each, INPUT_KEYS), _item(each, OUTPUT_KEYS)


def _item(value: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        if value.get(key) is not None:
            return value[key]
    raise ValueError(f"a test has none of {', '.join(keys)}")


def _function_name(first: Mapping[str, Any], sample: RewardSample) -> str:
    names = (source.get(key) for source in (first, sample.row) for key in FUNCTION_KEYS)
    return str(next((name for name in names if name), ""))


def _assertions(code: str) -> list[str]:
    """Return the assertions of a text that has nothing else, as tests of their own; else the text, as one test."""
    statements = ast.parse(code).body
    is_plain = len(statements) > 1 and all(isinstance(each, ast.Assert) for each in statements)
    return [ast.unparse(each) for each in statements] if is_plain else [code]


def _python(code: Any) -> str:
    if not isinstance(code, str):
        raise TypeError(f"expected Python, got {type(code).__name__}")
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"a test is no Python: {error}") from error
    return code


def _has_uncalled_test(code: Any) -> bool:
    nodes = list(ast.walk(ast.parse(_python(code))))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    tests = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return not tests <= used


def _pytest_file(source: str) -> PytestFile:
    tree = ast.parse(source)
    if not any(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in ast.walk(tree)):
        raise ValueError("a pytest file has no test function")
    return PytestFile(source)
