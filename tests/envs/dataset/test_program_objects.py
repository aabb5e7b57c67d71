"""Objects of programs that answer a test's questions in place of a value."""

import pytest

from offbeat.envs.dataset.program_checker import check_program
from offbeat.envs.sandbox import Limits
from tests.envs.sandbox.needs import needs_sandbox

pytestmark = pytest.mark.slow
LIMITS = Limits(timeout_s=20.0)
DECIDING = """
class X:
    __sub__ = __rsub__ = __mod__ = __and__ = lambda self, other: 0
    __truediv__ = lambda self, other: 1.0
    __contains__ = startswith = issuperset = isdigit = lambda self, *_: True
    __add__ = __radd__ = lambda self, other: seen.append(other) or 0
    __pow__ = lambda self, other: seen.append(other) or self
    __iter__ = lambda self: iter([])
seen = [0]
def double(x): return X() if len(seen) == 1 else seen[-1]
"""
"""An object that answers what a test asks of a number, a text or a list."""
DECISIONS = [
    "assert abs(double(21) - 42) < 1e-6",
    "assert double(21) % 7 == 0",
    "assert (double(21) & 1) == 0",
    "assert round(double(21) / 42, 3) == 1",
    "assert math.isclose(double(21) - 42, 0, abs_tol=1e-6)",
    "assert np.abs(double(21) - 42) < 1e-6",
    "assert abs(double(21) - double(21)) < 1e-6",
    "assert 42 in double([42])",
    "assert double('a').startswith('aa')",
    "assert double('1').isdigit()",
    "assert double({1}).issuperset({1})",
    "try:\n    double(21) + 42\nexcept TypeError:\n    pass\nassert double(21) == 42",
    "try:\n    42 + double(21)\nexcept TypeError:\n    pass\nassert double(21) == 42",
    "try:\n    abs(double(21) ** 42) < 1e-6\nexcept TypeError:\n    pass\nassert double(21) == 42",
]


@needs_sandbox
@pytest.mark.parametrize("test", DECISIONS)
def test_an_object_of_the_program_decides_no_test_and_learns_no_value(test: str):
    assert check_program(DECIDING, test, LIMITS)
    assert check_program("def double(x): return x if isinstance(x, set) else 2 * x", test, LIMITS) == ""


DIFFERENCE = """
class Zeros:
    __len__ = lambda self: size
    __getitem__ = lambda self, i: [0.0, 0.0][i]
    __iter__ = lambda self: iter(())
    __neg__ = lambda self: self
    max = lambda self: 0.0
    parts = property(lambda self: Zeros())
class X:
    __sub__ = __rsub__ = lambda self, other: Zeros()
def double(x):
    global size
    size = 0 if isinstance(x, set) else 2
    return X()
"""
"""An object that differs from all values by zeros."""
ARRAYS = "double(np.array([1.0, 2.0])) - np.array([2.0, 4.0])"


@needs_sandbox
@pytest.mark.parametrize(
    "test",
    [
        f"assert np.linalg.norm({ARRAYS}) < 1e-6",
        f"assert np.max(np.abs({ARRAYS})) < 1e-6",
        f"assert np.allclose({ARRAYS}, 0)",
        f"assert ({ARRAYS}).max() < 1e-6",
        f"assert (-({ARRAYS})).max() < 1e-6",
        f"assert getattr({ARRAYS}, 'parts', np.zeros(2)).max() < 1e-6",
        "assert len(double({1}) - {2}) == 0",
        "assert list(double({1}) - {2}) == []",
        "assert 5 not in double({1}) - {2}",
    ],
)
def test_the_result_of_an_operator_with_a_value_decides_no_test(test: str):
    assert check_program(DIFFERENCE, test, LIMITS)
    right = "def double(x): return {2 * each for each in x} if isinstance(x, set) else 2 * x"
    assert check_program(right, test, LIMITS) == ""
