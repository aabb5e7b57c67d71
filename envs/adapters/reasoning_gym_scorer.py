# pyright: basic
"""Program that scores answers by reasoning-gym, for `ReasoningGymEnv`.

JSON lines: a request in; out {"score": float}, {"error": text} of the library's scorer, {"failure": text} of the data set,
or null past the limits; first a bool: works.

Invariants: no score exceeds CPU time or memory, past which the kernel kills its process, a fork of one that has imported
the library; an answer is never run as code, though scorers pass answers to `eval` and to sympy's `parse_expr`, which is
`eval`.
"""

import ast
import importlib
import json
import operator
import os
import re
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
SEQUENCES: dict[type[ast.AST], Any] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "coth"),
    *("asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "cbrt", "root", "abs", "Abs", "pi", "factorial"),
    *("floor", "ceiling", "Min", "Max", "Rational", "Integer", "Float"),
)
"""Names of a formula besides single letters."""
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
TOKEN = re.compile(rf"(?P<number>{NUMBER})|(?P<name>[A-Za-z]\w*)|\s+|[-+*/^(),!]", re.ASCII)


def evaluate(text: Any, *_: Any) -> Any:
    """Evaluate literals and operators of Python; raises ValueError for anything else."""
    return _evaluate(ast.parse(str(text).strip(), mode="eval").body)


def _evaluate(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(kind, operand) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](_evaluate(operand))
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return SEQUENCES[type(node)](_evaluate(item) for item in items)
        case ast.Dict(keys, values):
            return {_evaluate(key): _evaluate(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError(f"not a literal: {type(node).__name__}")


def check_formula(text: str) -> None:
    """Raise ValueError unless a text has only numbers, single letters, `FUNCTIONS` and arithmetic."""
    end = 0
    for token in TOKEN.finditer(text):
        name = token["name"]
        if token.start() != end or (name and len(name) > 1 and name not in FUNCTIONS):
            break
        end = token.end()
    if end != len(text):
        raise ValueError(f"not a formula, from {text[end : end + 20]!r}")


def encode(value: Any) -> Any:
    """Encode an entry for JSON, which has no tuples and no keys but texts; raises TypeError."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode(each) for each in value]
        case tuple():
            return {"tuple": [encode(each) for each in value]}
        case dict():
            return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
        case Fraction():
            return {"fraction": str(value)}
    raise TypeError(f"{value!r:.80}: a {type(value).__name__} can't be passed to the scorer")


def decode(coded: Any) -> Any:
    match coded:
        case list():
            return [decode(each) for each in coded]
        case {"tuple": items}:
            return tuple(decode(each) for each in items)
        case {"dict": pairs}:
            return {decode(key): decode(each) for key, each in pairs}
        case {"fraction": text}:
            return Fraction(text)
    return coded


def main(cpu_s: float, memory_bytes: int) -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries print
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
    warnings.simplefilter("ignore")
    library = importlib.import_module("reasoning_gym")
    guard_library()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    print("true", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(score(library, json.loads(line), cpu_s)), file=replies, flush=True)


def score(library: Any, request: dict[str, Any], cpu_s: float) -> dict[str, Any] | None:
    try:
        dataset = library.create_dataset(request["dataset"], seed=request["seed"], size=1, **request["config"])
        entry = decode(request["entry"])
    except Exception as error:  # data sets raise anything
        return {"failure": _describe(error)}
    return run_forked(lambda: float(dataset.score_answer(request["answer"], entry)), cpu_s)


def run_forked(function: Callable[[], float], cpu_s: float) -> dict[str, Any] | None:
    """Call a function in a forked process; return its value as `score` or exception as `error`, None if it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                reply: dict[str, Any] = {"score": function()}
            except Exception as error:  # scorers raise anything, for anything
                reply = {"error": _describe(error)}
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(writer, json.dumps(reply).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reply_bytes = file.read()
    os.waitpid(pid, 0)
    return json.loads(reply_bytes) if reply_bytes else None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def guard_library() -> None:
    """Replace `eval` in reasoning-gym's modules, and sympy's `parse_expr`, by what never runs an answer."""
    sympy: Any = importlib.import_module("sympy")
    parse = sympy.parse_expr

    def parse_formula(text: Any, *args: Any, **kwargs: Any) -> Any:
        check_formula(str(text))
        return parse(text, *args, **kwargs)

    sympy.parse_expr = parse_formula
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            module.__dict__["eval"] = evaluate
            if module.__dict__.get("parse_expr") is parse:
                module.__dict__["parse_expr"] = parse_formula


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
