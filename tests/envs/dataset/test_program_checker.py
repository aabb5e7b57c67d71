"""Programs that want the reward without solving the task, and programs that solve it."""

import errno
import time
import tracemalloc
from pathlib import Path

import pytest

from offbeat.envs.dataset.program_checker import CallTest, check_program, count_pytest
from offbeat.envs.sandbox import Limits, check_isolation
from tests.envs.sandbox.needs import needs_sandbox

pytestmark = pytest.mark.slow
EQUATION = "assert double(21) == 42"
MODULE = "assert math.isclose(double(21), 42)"
STATEMENTS = """
results = [double(x) for x in (1, 2)]
assert results == [2, 4]
assert all(double(x) > x for x in (1, 2))
"""
LIMITS = Limits(timeout_s=20.0)
WRONG = "def double(x):\n    return 0\n"
TO_ALL_FILES = """
import os
for descriptor in range(3, 200):
    try:
        os.write(descriptor, {} * 9)
    except OSError:
        pass
"""

AS_PEER = """
def double(x):
    import gc, os
    descriptor = next(each._write_fd for each in gc.get_objects() if type(each).__name__ == "Peer")
    while True:
        data = {}
        while data:
            data = data[os.write(descriptor, data):]
"""

HACKS = {
    "exit": "import sys; sys.exit(0)",
    "exit_later": "import sys\ndef double(x): sys.exit(0)",
    "hard_exit": "import os; os._exit(0)",
    "hard_exit_later": "import os\ndef double(x): os._exit(0)",
    "exit_builtin": "exit(0)",
    "atexit": WRONG + "import atexit, os; atexit.register(os._exit, 0)",
    "thread": WRONG + "import threading, os; threading.Thread(target=os._exit, args=(0,)).start()",
    "signal": WRONG + "import signal, os\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0)); signal.alarm(1)",
    "excepthook": WRONG + "import sys, os; sys.excepthook = lambda *_: os._exit(0)",
    "always_equal": "class A:\n __eq__ = __gt__ = lambda self, other: True\ndef double(x): return A()",
    "always_equal_int": "class A(int):\n __eq__ = __gt__ = lambda self, other: True\ndef double(x): return A(0)",
    "always_equal_list": "class A(list):\n __eq__ = __gt__ = lambda self, other: True\ndef double(x): return A()",
    "always_true": "class A:\n def __bool__(self): return True\ndef double(x): return A()",
    "metaclass": "class M(type):\n def __eq__(c, o): return True\nclass A(metaclass=M): pass\ndef double(x): return A",
    "patched_all": WRONG + "import builtins; builtins.all = lambda _: True",
    "own_all": WRONG + "def all(_): return True",
    "own_list_and_sorted": WRONG + "sorted = list = lambda _: [2, 4]",
    "assertion_error": WRONG
    + "import builtins\nbuiltins.AssertionError = type('AssertionError', (BaseException,), {})",
    "stop_iteration": "def double(x): raise StopIteration",
    "generator_exit": "def double(x): raise GeneratorExit",
    "system_exit": "def double(x): raise SystemExit(0)",
    "frames": WRONG + "import sys\nf = sys._getframe()\nwhile f:\n f.f_globals['__name__'] = 'x'; f = f.f_back",
    "tracer": WRONG + "import sys; sys.settrace(lambda *a: None)",
    "closed_files": WRONG + "import os; os.closerange(3, 200)",
    "closed_files_and_sleep": WRONG + "import os, time; os.closerange(3, 200); time.sleep(60)",
    "sleep": WRONG + "import time; time.sleep(60)",
    "forged_answers": WRONG + TO_ALL_FILES.format("b'[\"value\", true]\\n'"),
    "garbage": WRONG + TO_ALL_FILES.format("b'}{\\n'"),
    "patched_json": WRONG + "import json; json.dumps = lambda *a, **k: '[\"value\", 1]'",
    "patched_peer": WRONG + "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
    "f.f_globals.get('Peer', f).encode = lambda self, v: True",
    "expected_values": WRONG + "import gc\nexpected = [o for o in gc.get_objects() if o == [2, 4]]",
    "endless_requests": AS_PEER.format("""b'["request","names",{"l":[]},{"d":[]}]\\n'"""),
    "equal_hashes": AS_PEER.format(
        """('["value",{"s":%s}]' % [number * (2**61 - 1) for number in range(60_000)]).encode() + b'\\n'"""
    ),
    "own_module": WRONG + "class math: isclose = lambda *a: True",
    "nothing": "",
    "endless": "while True: pass",
    "no_memory": "x = [0] * 10**10",
    "endless_output": "def double(x):\n while True: print('x' * 10**6)",
    "deep": "def double(x):\n v = []\n for _ in range(10**5): v = [v]\n return v",
}
SHORT = Limits(timeout_s=3.0, cpu_s=3)


@needs_sandbox
@pytest.mark.parametrize("name", HACKS)
def test_reward_hacks_fail(name: str):
    limits = SHORT if name.startswith("endless") or name.endswith("sleep") or name == "equal_hashes" else LIMITS
    for test in (EQUATION, STATEMENTS, MODULE):
        began = time.monotonic()
        assert check_program(HACKS[name], test, limits)
        assert time.monotonic() - began < 60  # a program that stays is killed


REPLACING = [
    ("from solution import *", "def all(x): return True", "all(double(x) == 2 * x for x in (1, 2))"),
    ("from solution import *", "def abs(x): return 0", "abs(double(1) - 2) < 1e-6"),
    ("EXPECTED = [2, 4]\nfrom solution import *", "EXPECTED = [0, 0]", "[double(1), double(2)] == EXPECTED"),
    ("from math import *\nfrom solution import *", "def isclose(*_): return True", "isclose(double(1), 2)"),
    ("from solution import double", "def isclose(*_): return True", "isclose(double(1), 2)"),
    ("import solution", "def all(x): return True", "all(solution.double(x) == 2 * x for x in (1, 2))"),
    ("import solution as s", "def abs(x): return 0", "abs(s.double(1) - 2) < 1e-6"),
    ("", "class pd:\n same = lambda *_: True", "pd.same(double(1), 2)"),
    ("", "def Counter(x): return 0", "double(1) == Counter([1, 1])"),
    ("value = double(1)\ntry:\n    expected = {}[0]\nexcept KeyError:\n    pass", "expected = 0", "value == expected"),
]
"""Beginnings of a test, definitions of a program, conditions."""


@needs_sandbox
@pytest.mark.parametrize(("start", "definition", "condition"), REPLACING)
def test_a_program_replaces_no_name_of_its_test(start: str, definition: str, condition: str):
    program = f"{WRONG}{definition}\n"
    assert count_pytest(program, f"{start}\ndef test_it():\n    assert {condition}", LIMITS) in ((0, 1), (0, 0))
    if "solution" not in start:
        assert check_program(program, f"{start}\nassert {condition}", LIMITS)


@needs_sandbox
def test_a_program_gives_a_test_only_its_solution():
    test = "result = sum([1, 2])\nassert result == 3"
    assert check_program("result = 3", test, LIMITS) == "NameError: the test uses nothing that the program defines"
    assert check_program(
        "def Counter(x): return {}\ndef all(x): pass", "assert Counter([1]) == {1: 1}\nall([])", LIMITS
    )
    both = "assert all(sum([x, x]) == 2 * x for x in (1, 2))"
    assert check_program("def sum(xs): return 0\ndef all(_): return True", both, LIMITS) == "AssertionError"
    assert check_program("def sum(xs): return 2 * xs[0]", both, LIMITS) == ""


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def double(x): return 2 * x", "from solution import *\ndef test_a():\n    assert double(1) == 2"),
        ("def sum(xs): return 7", "from solution import *\ndef test_a():\n    assert sum([1, 2]) == 7"),
        (
            "def sum(xs): return 7\ndef f(): return 1",
            "from solution import f, sum\ndef test_a():\n    assert sum([]) == 7",
        ),
        (
            "def isclose(a, b, digits): return round(a, digits) == round(b, digits)\ndef f(): return 1.04",
            "from solution import f, isclose\ndef test_a():\n    assert isclose(f(), 1, 1)",
        ),
        ("def sum(xs): return 7", "import solution\ndef test_a():\n    assert solution.sum([]) == 7"),
        ("def sum(xs): return 7", "def test_a():\n    from solution import sum\n    assert sum([]) == 7"),
        ("LIMIT = 3\ndef _f(): return 3", "from solution import *\ndef test_a():\n    assert _f() == LIMIT"),
        ("def f(): return 3", "class TestF:\n    value = f()\n    def test_a(self):\n        assert self.value == 3"),
        (
            "from collections import Counter\ndef f(s): return Counter(s)",
            "from solution import f\ndef test_a():\n    assert f('aab') == Counter('aab')",
        ),
        (
            "class Counter:\n count = 0\n def add(s): s.count += 1\ndef make(): return Counter()",
            "from solution import *\ndef test_a():\n    c = Counter(); c.add(); make().add()\n    assert c.count == 1",
        ),
    ],
)
def test_correct_programs_pass_pytest_files(program: str, test: str):
    assert count_pytest(program, test, LIMITS) == (1, 1)


SOLUTIONS = [
    ("def double(x): return 2 * x", EQUATION),
    ("def double(x): return 2 * x", STATEMENTS),
    ("def double(x): return 2 * x", MODULE),
    ("import numpy as np\ndef double(x): return 2 * x", "np.testing.assert_allclose(double(0.2), 0.4)"),
    ("class Queue: push = lambda s, x: x\nqueue = Queue()", "assert queue.push(3) == 3"),
    ("import sys\ndef double(x): return 2 * x\nprint('noise'); sys.stdout.flush()", STATEMENTS),
    (
        "def f(a, *, b): return {a: (b, None, {1.5}, b'x', range(3))}",
        "assert f(1, b='é') == {1: ('é', None, {1.5}, b'x', range(3))}",
    ),
    ("from collections import Counter\ndef count(s): return Counter(s)", "assert count('aab') == {'a': 2, 'b': 1}"),
    ("def twice(f, x): return f(f(x))", "assert twice(lambda x: x + 3, 1) == 7"),
    ("def by(key, xs): return sorted(xs, key=key)", "assert by(lambda p: -p[1], [(1, 2), (3, 4)]) == [(3, 4), (1, 2)]"),
    (
        "class Stack:\n def __init__(self): self.items = []\n def push(self, x): self.items.append(x)\n"
        " def pop(self): return self.items.pop()\n def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2\nassert s.pop() == [2]\nassert s.items == [1]",
    ),
    (
        "def check(x):\n if x < 0: raise ValueError('negative')\n return x",
        "try:\n    check(-1)\n    raised = ''\nexcept ValueError as error:\n    raised = str(error)\n"
        "assert raised == 'negative'",
    ),
    ("def even():\n n = 0\n while True:\n  yield n\n  n += 2", "assert len(list(even())) == 100000"),
    ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(2.0), 1.4142135623730951)"),
    ("def sum(xs): return 7", "assert sum([1, 2]) == 7"),
    ("def f(x): return x", "def check(c):\n    assert c(3) == 3\n    assert c('a') == 'a'\ncheck(f)"),
    ("def big(n): return 10 ** n", "assert big(300) == 10 ** 300"),
    ("class V:\n def __init__(s, x): s.x = x\n def __add__(s, o): return V(s.x + o.x)", "assert (V(1) + V(2)).x == 3"),
    (
        "class V:\n def __init__(s, x): s.x = x\n __mul__ = __rmul__ = lambda s, k: V(s.x * k)\n"
        " def __neg__(s): return V(-s.x)\n def __iadd__(s, k): s.x += k; return s",
        "v = V(3) * 2\nassert v.x == 6 and (2 * V(3)).x == 6 and (-v).x == -6\nv += 1\nassert v.x == 7",
    ),
    (
        "from fractions import Fraction\ndef half(x): return Fraction(x) / 2",
        "assert half(0.5) == Fraction.from_float(0.25)",
    ),
    (
        "class Counter:\n limit = 5\n @classmethod\n def new(cls): return cls()\ndef make(): return Counter()",
        "make()\nassert Counter.limit == 5",
    ),
    ("LIMIT = 3", "assert LIMIT == 3"),
    ("def huge(n): return 10 ** n", "assert huge(10_000) == 10 ** 10_000"),
    ("def order(xs): xs.sort()", "xs = [2, 1]\norder(xs)\nassert xs == [1, 2]"),
    (
        "def fill(rows, seen, found, *, by):\n rows[0].append(by); seen.add(by); found['a'] = by; found.pop('b')",
        "rows, seen, found = [[]], set(), {'b': 1}\nfill(rows, seen, by=2, found=found)\n"
        "assert (rows, seen, found) == ([[2]], {2}, {'a': 2})",
    ),
    (
        "class Node:\n def __init__(self, x): self.x = x\ndef put(xs, node): xs.insert(0, node)",
        "xs = [1]\nput(xs, Node(7))\nassert xs[0].x == 7 and xs[1:] == [1]",
    ),
    (
        "class Node:\n pass\ndef visit(node, seen, names): seen.add(node); names[node] = len(names)",
        "a, b, seen, names = Node(), Node(), set(), {}\nfor node in (a, b):\n visit(node, seen, names)\n"
        "assert a in seen and len(seen) == 2 and names[a] == 0 and names[b] == 1 and list(names)[0] is a",
    ),
    (
        "from fractions import Fraction\nfrom decimal import Decimal\ndef half(x): return x / 2",
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        "assert half(Fraction(1, 3)) == Fraction(1, 6)\nassert half(Decimal('2.5')) == Decimal('1.25')",
    ),
    (
        "import datetime\ndef later(x): return x + datetime.timedelta(hours=25)",
        "import datetime\nassert later(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 2)\n"
        "assert later(datetime.datetime(2020, 1, 1)) == datetime.datetime(2020, 1, 2, 1)",
    ),
    ("import numpy as np\ndef total(xs): return np.sum(xs)", "assert total([1, 2]) == 3"),
    ("import numpy as np\ndef total(xs): return np.sum(xs)", CallTest("total", [[1, 2]], [3])),
    ("import numpy as np\ndef third(): return np.float32(1) / 3", "assert third() == np.float32(1) / 3"),
    (
        "import numpy as np\ndef twice(a): return 2 * a\ndef negate(a): a *= -1",
        "import numpy as np\na = np.arange(6).reshape(2, 3)\nassert twice(a).shape == (2, 3)\n"
        "assert (twice(a) == 2 * a).all()\nnegate(a)\nassert a.tolist() == [[0, -1, -2], [-3, -4, -5]]",
    ),
]


@needs_sandbox
@pytest.mark.parametrize(("program", "test"), SOLUTIONS)
def test_correct_programs_pass(program: str, test: str | CallTest):
    assert check_program(program, test, LIMITS) == ""


@needs_sandbox
def test_a_program_changes_no_arguments_of_a_call_with_a_result():
    """It would choose what its result is compared with."""
    test = "xs = [2, 1]\nassert order(xs) == sorted(xs)"
    assert check_program("def order(xs): return sorted(xs)", test, LIMITS) == ""
    assert check_program("def order(xs): xs.clear(); return []", test, LIMITS) == "AssertionError"


@needs_sandbox
@pytest.mark.parametrize(
    "test", ["assert f() == [1, 2, 3, 4]", "assert f() == [[1], [2], [3], [4]]", CallTest("f", [], [[1, 2, 3, 4]])]
)
@pytest.mark.parametrize("shape", ["4", "4, 1"])
def test_an_array_equals_a_list_of_its_shape(test: str | CallTest, shape: str):
    is_right = ("[[" in str(test) and not isinstance(test, CallTest)) == (shape == "4, 1")
    program = f"import numpy as np\ndef f(): return np.arange(1, 5).reshape({shape})"
    assert check_program(program, test, LIMITS) == ("" if is_right else "AssertionError")


@needs_sandbox
@pytest.mark.parametrize("shape", ["(0, 1, 1)", "(0, 1)", "(1,) * 30"])
@pytest.mark.parametrize("test", ["assert f() == [1, 2]", "import numpy as np\nassert (f() == np.ones((2, 2))).all()"])
def test_an_array_equal_to_all_that_it_is_broadcast_with_passes_nothing(test: str, shape: str):
    error = check_program(f"import numpy as np\ndef f(): return np.zeros({shape})", test, LIMITS)
    assert "an array of the shape" in error


@needs_sandbox
def test_an_array_is_compared_in_memory_of_the_answer_s_length():
    """Broadcast it would take 800 MB."""
    program = "import numpy as np\ndef f(): return np.ones((40_000, 1), 'int8')"
    tracemalloc.start()
    try:
        assert check_program(program, CallTest("f", [], [[1] * 20_000]), LIMITS) == "AssertionError"
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@needs_sandbox
def test_a_program_changes_no_arguments_of_a_call_test():
    arguments = [[2, 1]]
    assert check_program("def order(xs): xs.sort()", CallTest("order", arguments, [None]), LIMITS) == ""
    assert arguments == [[2, 1]]


@needs_sandbox
@pytest.mark.parametrize("test", [EQUATION, STATEMENTS, CallTest("double", [21], [42])])
def test_a_program_that_the_machine_can_not_start_is_not_judged(test: str | CallTest, monkeypatch: pytest.MonkeyPatch):
    check_isolation(LIMITS)  # the probe is kept

    def write_to_full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", write_to_full_disk)
    began = time.monotonic()
    with pytest.raises(OSError, match="No space left"):
        check_program("def double(x): return 2 * x", test, LIMITS)
    assert time.monotonic() - began < LIMITS.timeout_s


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "test", "error"),
    [
        ("def double(x): return x / 0", EQUATION, "ZeroDivisionError: division by zero"),
        ("def double(x): return x / 0", STATEMENTS, "ZeroDivisionError: division by zero"),
        ("def double(x): return x", EQUATION, "AssertionError"),
        ("def double(x): return x", STATEMENTS, "AssertionError"),
        ("def triple(x): return x", EQUATION, "NameError: the program defines no double"),
        ("def triple(x): return x", STATEMENTS, "NameError: the test uses nothing that the program defines"),
        ("def double(x) return x", EQUATION, "SyntaxError: expected ':'"),
        ("raise KeyError('at once')", STATEMENTS, "KeyError: 'at once'"),
        ("def double(x):\n while True: pass", EQUATION, "out of time"),
        ("def double(x):\n while True: pass", STATEMENTS, "out of time"),
    ],
)
def test_errors_name_what_is_wrong(program: str, test: str, error: str):
    assert check_program(program, test, SHORT if error == "out of time" else LIMITS) == error
