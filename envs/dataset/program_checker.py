"""Verdicts on untrusted programs.

A program and its test run in two sandboxes, connected by `peer`; a call of plain values is tested from this process.
Invariant: the program can't see expected values, nor affect or hold up the test's side.
"""

import ast
import json
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from offbeat.envs.dataset.peer import Peer, connect
from offbeat.envs.sandbox import STARTUP_TIMEOUT_S, Limits, ProgramResult, run_python
from offbeat.envs.sandbox.pipes import close_all, closing_on_error, duplicate, open_pipes

PYTEST_CPU_S = 5
"""CPU time for pytest's imports."""
SOLUTION = "Solution"
"""The class of LeetCode's programs."""
MIN_ANSWER_BYTES = 100_000
"""Longest answer where the expected one is short: a set of 5,000 numbers, a second of CPU time if all hashes are equal."""
END_TIMEOUT_S = 2.0
"""For a program that closed its pipes."""

TestT = TypeVar("TestT")
ResultT = TypeVar("ResultT")


class CallTest(NamedTuple):
    """A call of a program's function, as published datasets have it."""

    function: str
    """Its name, also that of a method of `Solution`; or `Class.method`."""
    arguments: Sequence[Any]
    accepted: Sequence[Any]
    """Values of which the call returns one; a tuple equals a list."""


def run_tests(
    tests: Sequence[TestT],
    run: Callable[[TestT, Limits], ResultT],
    has_failed: Callable[[ResultT], bool],
    limits: Limits,
    max_total_s: float,
    longest_s: float = math.inf,
) -> Iterator[ResultT]:
    """Yield the results of a program's tests, up to one that may not end within `max_total_s` if another has failed by its
    time limit, or up to `longest_s`, when a test that still runs ends.

    A slow program must be wrong before its judge's timeout, which is a failure of the infrastructure; one that is right
    in each test has all of `longest_s`.
    """
    began, is_too_slow = time.monotonic(), False
    for test in tests:
        start = time.monotonic()
        if is_too_slow and start + limits.timeout_s > began + max_total_s:
            return
        if (left_s := began + longest_s - start) <= 0:
            return
        result = run(test, limits.model_copy(update={"timeout_s": min(limits.timeout_s, left_s)}))
        took_s = time.monotonic() - start
        is_too_slow = is_too_slow or (has_failed(result) and took_s >= min(limits.timeout_s, limits.cpu_s))
        yield result


def check_program(program: str, test: str | CallTest, limits: Limits) -> str:
    """Return why a test fails after a program, or "". test: code, or a call."""
    with _started(program, limits) as (running, read_fd, write_fd):
        if isinstance(test, CallTest):
            error = _check_call(test, read_fd, write_fd, limits)
        elif (equation := _equation_of(test)) is None:
            error = _run_test(test, *duplicate(read_fd, write_fd), limits)
        else:
            error = _check_equation(*equation, read_fd, write_fd, limits)
        return _own_error(running) or error if error.startswith("EOFError") else error


def check_output(program: str, stdin: str, expected: str, limits: Limits) -> str:
    """Return why a program's output is not the expected words, or ""; long outputs are compared as a whole."""
    room = max(limits.max_output_chars, 2 * len(expected))
    outcome = run_python(program, stdin=stdin, limits=limits.model_copy(update={"max_output_chars": room}))
    if not outcome.ok:
        return outcome.error
    if outcome.stdout.split() != expected.split():
        return f"printed {outcome.stdout[:200]!r}, not {expected[:200]!r}"
    return ""


def count_pytest(program: str, tests: str, limits: Limits) -> tuple[int, int]:
    """Return the numbers of passed and of all tests of a pytest file, without those that it marks as skipped or as failing;
    (0, 0) if it did not start. The time limit is that of the file.
    """
    source = f"{_test_source()}\n{_source('pytest_runner.py')}"
    with _started(program, limits) as (_, read_fd, write_fd):
        descriptors = duplicate(read_fd, write_fd)
        call = f"run_pytest({tests!r}, *{descriptors}, {limits.timeout_s}, {STARTUP_TIMEOUT_S})"
        more = {"timeout_s": limits.timeout_s + STARTUP_TIMEOUT_S, "cpu_s": limits.cpu_s + PYTEST_CPU_S}
        patient = limits.model_copy(update=more)
        result = run_python(f"{source}\n{call}", limits=patient, pass_fds=descriptors)
    count = re.fullmatch(r"(\d+) ([.s]*)\s*", result.stdout)
    return (count[2].count("."), int(count[1]) - count[2].count("s")) if count else (0, 0)


@contextmanager
def _started(program: str, limits: Limits) -> Generator[tuple["Future[ProgramResult]", int, int]]:
    """Run a program until the context ends; yield its future result and our ends of two pipes.

    Raises what kept the program from running, such as a full disk: no test has failed then.
    """
    program_reads, write_fd, read_fd, program_writes = open_pipes()
    source = f"{_source('peer.py')}\nserve_program({program!r}, {program_reads}, {program_writes})"
    # It waits for its test to start, and is bounded by the test's time
    patient = limits.model_copy(update={"timeout_s": limits.timeout_s + 2 * STARTUP_TIMEOUT_S})
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        try:
            passed = program_reads, program_writes
            with closing_on_error(passed):  # no thread could start
                running = thread.submit(run_python, source, limits=patient, pass_fds=passed, stop=stop)
            yield running, read_fd, write_fd
        finally:
            stop.set()
            close_all((read_fd, write_fd))
    running.result()


def _own_error(running: "Future[ProgramResult]") -> str:
    try:
        return running.result(END_TIMEOUT_S).error
    except TimeoutError:
        return ""  # it only closed its pipes


def _run_test(test: str, read_fd: int, write_fd: int, limits: Limits) -> str:
    """Return the error; empty if passed."""
    call = f"run_test({test!r}, {read_fd}, {write_fd}, {limits.timeout_s}, {STARTUP_TIMEOUT_S})"
    patient = limits.model_copy(update={"timeout_s": limits.timeout_s + STARTUP_TIMEOUT_S})
    error = run_python(f"{_test_source()}\n{call}", limits=patient, pass_fds=(read_fd, write_fd)).error
    return error.removeprefix("TimeoutError: ")


def _test_source() -> str:
    return f"{_source('peer.py')}\n{_source('bindings.py')}"


@cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _equation_of(test: str) -> tuple[str, list[Any], dict[str, Any], Any] | None:
    """Return (function, arguments, keywords, value) of `assert f(literals) == literal`, which needs no sandbox."""
    try:
        match ast.parse(test).body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), args, keywords), [ast.Eq()], [expected]))]:
                values = [ast.literal_eval(arg) for arg in args]
                named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg}
                return (name, values, named, ast.literal_eval(expected)) if len(named) == len(keywords) else None
            case _:
                return None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _check_equation(
    name: str, args: list[Any], kwargs: dict[str, Any], expected: Any, read_fd: int, write_fd: int, limits: Limits
) -> str:
    def is_right(peer: Peer) -> bool:
        return _global(peer, name)(*args, **kwargs) == expected

    return _ask(is_right, expected, read_fd, write_fd, limits)


def _check_call(test: CallTest, read_fd: int, write_fd: int, limits: Limits) -> str:
    def is_right(peer: Peer) -> bool:
        result = _with_lists(_find_function(peer, test.function)(*test.arguments))
        return any(result == _with_lists(each) for each in test.accepted)

    return _ask(is_right, test.accepted, read_fd, write_fd, limits)


def _ask(is_right: Callable[[Peer], bool], expected: Any, read_fd: int, write_fd: int, limits: Limits) -> str:
    """Return why a started program fails, or "".

    This process compares, within `limits.timeout_s`: requests of the program and answers much longer than the expected
    value are errors.
    """
    try:
        peer = connect(read_fd, write_fd, limits.timeout_s, STARTUP_TIMEOUT_S)
        peer.takes_requests = False
        peer.max_bytes = MIN_ANSWER_BYTES + 8 * len(json.dumps(peer.encode(expected)))
        return "" if is_right(peer) else "AssertionError"
    except TimeoutError as error:
        return str(error)
    except Exception as error:  # a program may send anything
        return f"{type(error).__name__}: {error}"


def _global(peer: Peer, name: str) -> Any:
    if name not in peer.request("names"):
        raise NameError(f"the program defines no {name}")
    return peer.request("global", name)["value"]


def _find_function(peer: Peer, name: str) -> Any:
    owner, _, method = name.rpartition(".")
    names = peer.request("names")
    if not owner and name not in names and SOLUTION in names:
        owner = SOLUTION
    return getattr(_global(peer, owner)(), method) if owner else _global(peer, name)


def _with_lists(value: Any) -> Any:
    """Return lists for tuples, which JSON has not."""
    return [_with_lists(each) for each in cast(list[Any], value)] if isinstance(value, list | tuple) else value
