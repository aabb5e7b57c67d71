"""The real sandbox; nothing of the response may run elsewhere."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.services.reward.errors import Failure, RewardError
from tests.services.reward.samples import config_of, score

pytestmark = pytest.mark.slow
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
WRONG_FOR_NEGATIVE = "```python\ndef add(a, b):\n    return abs(a) + abs(b)\n```"
ECHO = "```python\nprint(input())\nprint(input())\n```"
FAST: dict[str, Any] = {"sandbox": {"timeout_s": 8.0, "cpu_s": 2}, "reward": "pass_rate"}
"""A program that hangs ends by its CPU time, as a stall of the machine takes none."""


def rate(response: str, tests: Any, **row: Any) -> float:
    return score("code_sandbox", response, row={"test_cases": tests, **row}, **FAST)


def test_stdin_and_stdout():
    tests = {"inputs": ["1\n2\n", "3\n4\n"], "outputs": ["1\n2", "3\n5"]}
    assert rate(ECHO, tests) == 0.5
    assert rate(ECHO, json.dumps(tests)) == 0.5
    assert rate(ECHO, [{"input": "1\n2", "output": "1 2"}]) == 1.0
    assert rate(ECHO, [{"stdin": "1", "expected_output": "1"}], case_type="input") == 0.0


def test_a_long_output_is_compared_whole():
    program = "```python\nprint('x ' * 20_000)\n```"
    assert rate(program, {"inputs": [""], "outputs": ["x " * 20_000]}) == 1.0
    assert rate(program, {"inputs": [""], "outputs": ["x " * 19_999]}) == 0.0


def test_assert_lines():
    tests = ["assert add(1, 2) == 3", "assert add(-1, 2) == 1"]
    assert rate(ADD, tests) == 1.0
    assert rate(WRONG_FOR_NEGATIVE, tests) == 0.5
    assert rate(WRONG_FOR_NEGATIVE, [*tests, "", "# edge cases"]) == 0.5
    assert rate(WRONG_FOR_NEGATIVE, "\n".join(tests)) == rate(WRONG_FOR_NEGATIVE, ["\n".join(tests)]) == 0.5
    assert rate(ADD, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)") == 1.0
    assert rate(WRONG_FOR_NEGATIVE, "\n".join(["total = 1", *tests])) == 0.0  # one test, for a line may need another
    assert score("code_sandbox", ADD, tests) == 1.0
    assert score("code_sandbox", WRONG_FOR_NEGATIVE, tests) == 0.0


def test_calls_of_a_function_and_of_a_method():
    tests = {"fn_name": "add", "inputs": [[1, 2], [-1, 2]], "outputs": [3, 1]}
    assert rate(WRONG_FOR_NEGATIVE, tests) == 0.5
    assert rate(ADD, [{"input": "1\n2", "output": "3"}], case_type="functional", entry_point="add") == 1.0
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    assert rate(method, {**tests, "fn_name": "Solution.add"}) == 1.0
    assert rate(method, tests) == 1.0


def test_calls_of_apps():
    """As its `testing_util.py`: an output may be in a list, and a tuple is a list."""
    pair = "```python\ndef pair(a, b):\n    return (a, [(b, b)])\n```"
    assert rate(ADD, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [8]]}) == 0.5
    assert rate(pair, {"fn_name": "pair", "inputs": [[1, 2]], "outputs": [[1, [[2, 2]]]]}) == 1.0
    assert rate(ADD, [{"input": [1, 2], "output": [3], "fn_name": "add"}]) == 0.0  # a list is asked for


PYTEST = """
import pytest
from solution import add

@pytest.mark.parametrize(("a", "b"), [(1, 2), (-1, 2)])
def test_sum(a, b):
    assert add(a, b) == a + b

class TestErrors:
    def test_types(self):
        with pytest.raises(TypeError):
            add(1, "a")
"""


def test_a_pytest_file():
    assert rate(ADD, PYTEST) == 1.0
    assert rate(WRONG_FOR_NEGATIVE, PYTEST) == pytest.approx(2 / 3)
    assert rate("```python\nx = 1\n```", PYTEST) == 0.0
    assert rate(ADD, PYTEST.replace("from solution import add", "")) == 1.0


@pytest.mark.parametrize("imports", ["", "from solution import *", "from solution import add, math"])
def test_a_program_does_not_replace_a_module_of_a_pytest_file(imports: str):
    tests = f"{imports}\ndef test_sum():\n    assert math.isclose(add(-1, 2), 1)"
    hostile = "\nclass math:\n    isclose = lambda *_: True\n```"
    assert rate(ADD, tests) == 1.0
    assert rate(WRONG_FOR_NEGATIVE.removesuffix("\n```") + hostile, tests) == 0.0
    own_raises = "\nclass pytest:\n    raises = lambda *_: open('/dev/null')\n```"
    tests = "import pytest\nfrom solution import *\ndef test_types():\n    with pytest.raises(TypeError): add(1, 'a')"
    assert rate(ADD, tests) == 1.0
    assert rate("```python\ndef add(a, b): return 0" + own_raises, tests) == 0.0


def test_tests_that_a_pytest_file_skips_or_expects_to_fail_do_not_count():
    marked = """
@pytest.mark.skip
def test_later(): assert add(1, 1) == 3

@pytest.mark.xfail
def test_known(): assert add(1, 1) == 3

@pytest.mark.xfail(reason="fixed")
def test_fixed(): assert add(1, 1) == 2

@pytest.mark.xfail(run=False)
def test_endless(): assert add(1, 1) == 3

@pytest.fixture
def broken(): raise ValueError

@pytest.mark.xfail
def test_with_fixture(broken): assert add(1, 1) == 3

import unittest

class TestCases(unittest.TestCase):
    @unittest.skip("later")
    def test_later(self): assert add(1, 1) == 3
"""
    assert rate(ADD, PYTEST + marked) == 1.0
    assert rate(WRONG_FOR_NEGATIVE, PYTEST + marked) == pytest.approx(2 / 3)
    by_the_program = "def test_any():\n    if add(1, 1) != 2: pytest.skip()"
    assert rate("```python\ndef add(a, b): return 0\n```", f"import pytest\n{by_the_program}") == 0.0


def test_a_list_of_pytest_files():
    tests = ["def test_a():\n    assert add(1, 2) == 3", "def test_b():\n    assert add(-1, 2) == 1"]
    assert rate(ADD, tests) == 1.0
    assert rate(WRONG_FOR_NEGATIVE, tests) == rate(WRONG_FOR_NEGATIVE, json.dumps(tests)) == 0.5


def test_a_list_whose_test_functions_are_called_is_code():
    tests = ["def test_a():\n    assert add(-1, 2) == 1\ntest_a()", "assert add(0, 0) == 0"]
    assert rate(ADD, tests) == 1.0
    assert rate(WRONG_FOR_NEGATIVE, tests) == rate(WRONG_FOR_NEGATIVE, tests[::-1]) == 0.5


HOSTILE = {
    "exits": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "always equal": "class A:\n    def __eq__(self, other): return True\ndef add(a, b): return A()",
    "prints dots": "print('3 ...')\nimport os\nos.write(1, b'3 ...')",
    "patches pytest": "import sys\nsys.modules['pytest'] = None\ndef add(a, b): return 7",
    "hangs": "while True: pass",
    "is no Python": "'''; import os; os.system('true'); '''" + "\n(",
    "eats memory": "x = [0] * (1 << 40)",
    "deep": "(" * 5_000 + ")" * 5_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_pass_nothing(name: str):
    program = f"```python\n{HOSTILE[name]}\n```"
    assert rate(program, PYTEST) == 0.0
    assert rate(program, ["assert add(5, 5) == 10"]) == 0.0


def test_a_program_touches_neither_files_nor_this_process(tmp_path: Path):
    target = tmp_path / "touched"
    attack = f"open({str(target)!r}, 'w').write('x')\nimport os, signal\nos.kill({os.getpid()}, signal.SIGTERM)"
    before = threading.active_count()
    assert rate(f"```python\n{attack}\n```", {"inputs": [""], "outputs": [""]}) == 0.0
    assert not target.exists()
    assert threading.active_count() <= before + 8


@pytest.mark.parametrize("response", ["", "print(1)", "```python\nprint(1)", "<think>```python\nprint(1)\n```"])
def test_a_response_without_a_program_scores_zero(response: str):
    assert rate(response, {"inputs": [""], "outputs": ["1"]}) == 0.0


def test_an_endless_program_is_wrong_within_max_total_s_and_a_right_one_has_all_its_tests():
    slow = "```python\nn = input()\nwhile n == '1': pass\nprint(n)\n```"
    row = {"test_cases": {"inputs": ["0", "1", "0", "0"], "outputs": ["0", "1", "0", "0"]}}
    assert score("code_sandbox", slow, row=row, **{**FAST, "max_total_s": 0.01}) == 0.25
    assert score("code_sandbox", slow, row=row, **FAST) == 0.75
    right = {"max_total_s": 0.01, "sandbox": {"timeout_s": 60.0}}
    tests = ["assert add(1, 2) == 3"] * 3
    assert (
        score("code_sandbox", ADD, tests, **right)
        == score("code_sandbox", ADD, tests, reward="pass_rate", **right)
        == 1.0
    )


@pytest.mark.parametrize(
    ("total", "reward", "highest"), [("a + b", "pass_rate", 0.8), ("0", "pass_rate", 0.0), ("a + b", "all", 0.0)]
)
def test_a_program_slow_but_within_its_time_limit_is_scored_before_the_timeout(
    total: str, reward: str, highest: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.services.reward.kinds.code_sandbox.TESTS_SHARE", 0.05)  # 6 s of 120
    slow = f"```python\nimport time\ndef add(a, b):\n    time.sleep(0.5)\n    return {total}\n```"
    settings = {"reward": reward, "sandbox": {"timeout_s": 2.0}, "max_total_s": 1.0, "timeout_s": 120.0}
    assert score("code_sandbox", slow, ["assert add(1, 2) == 3"] * 300, **settings) <= highest


@pytest.mark.parametrize(
    ("tests", "row"),
    [
        (None, {}),
        ([], {}),
        ("assert (", {}),
        ([3], {}),
        ({"inputs": ["1"], "outputs": []}, {}),
        ({"inputs": ["1"]}, {}),
        ([{"no": "keys"}], {}),
        ("def helper(): pass", {"case_type": "pytest"}),
        ([[1, 2]], {"case_type": "function"}),
        ({"fn_name": "os.system('x')", "inputs": [[1]], "outputs": [1]}, {}),
        ([{"input": {"a": 1, "b": 2}, "output": 3, "fn_name": "add"}], {}),
        ("def check():\n    assert add(1, 2) == 3", {}),
        (["METADATA = {'dataset': 'test'}\ndef check(candidate):\n    assert candidate(1, 2) == 3"], {}),
        (["import math", "assert add(1, 2) == 3"], {}),
        (["assert add(1, 2) == 3", "def test_b():\n    assert add(1, 2) == 3"], {}),
        (["def test_a():\n    assert add(1, 2) == 3\ntest_a()", "def check():\n    assert add(1, 2) == 3"], {}),
        ("", {}),
        (["", "# edge cases"], {}),
        (["assert True"], {"case_type": "magic"}),
        (7, {}),
    ],
)
def test_rows_without_usable_tests_fail(tests: Any, row: dict[str, Any]):
    with pytest.raises(RewardError) as raised:
        rate(ADD, tests, **row)
    assert raised.value.failure is Failure.BAD_ROW


def test_a_timeout_that_slow_programs_reach_is_refused():
    with pytest.raises(ValidationError, match="must exceed max_total_s"):
        config_of("code_sandbox", timeout_s=30.0)
