"""Verdicts on untrusted programs.

A program and its test run in two sandboxes, connected by `peer`: the program can't see expected values, nor affect the
test's side.
"""

import ast
import os
import re
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from offbeat.envs.dataset.peer import connect
from offbeat.envs.sandbox import STARTUP_TIMEOUT_S, Limits, ProgramResult, run_python

PYTEST_CPU_S = 5
"""CPU time for pytest's imports."""
END_TIMEOUT_S = 2.0
"""For a program that closed its pipes."""


def check_program(program: str, test: str, limits: Limits) -> str:
    """Return why a test fails after a program, or ""."""
    with _started(program, limits) as (running, read_fd, write_fd):
        equation = _equation_of(test)
        if equation is None:
            error = _run_test(test, os.dup(read_fd), os.dup(write_fd), limits)
        else:
            error = _check_equation(*equation, read_fd, write_fd, limits)
        return _own_error(running) or error if error.startswith("EOFError") else error


def count_pytest(program: str, tests: str, limits: Limits) -> tuple[int, int]:
    """Return the numbers of passed and of all tests of a pytest file; (0, 0) if it did not start. The time limit is
    that of the file.
    """
    source = f"{_peer_source()}\n{_source('pytest_runner.py')}"
    with _started(program, limits) as (_, read_fd, write_fd):
        descriptors = os.dup(read_fd), os.dup(write_fd)
        call = f"run_pytest({tests!r}, *{descriptors}, {limits.timeout_s}, {STARTUP_TIMEOUT_S})"
        more = {"timeout_s": limits.timeout_s + STARTUP_TIMEOUT_S, "cpu_s": limits.cpu_s + PYTEST_CPU_S}
        patient = limits.model_copy(update=more)
        result = run_python(f"{source}\n{call}", limits=patient, pass_fds=descriptors)
    count = re.fullmatch(r"(\d+) (\.*)\s*", result.stdout)
    return (len(count[2]), int(count[1])) if count else (0, 0)


@contextmanager
def _started(program: str, limits: Limits) -> Generator[tuple["Future[ProgramResult]", int, int]]:
    """Run a program until the context ends; yield its future result and our ends of two pipes."""
    program_reads, write_fd = os.pipe()
    read_fd, program_writes = os.pipe()
    source = f"{_peer_source()}\nserve_program({program!r}, {program_reads}, {program_writes})"
    # It waits for its test to start, and is bounded by the test's time
    patient = limits.model_copy(update={"timeout_s": limits.timeout_s + 2 * STARTUP_TIMEOUT_S})
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_python, source, limits=patient, pass_fds=(program_reads, program_writes), stop=stop)
        try:
            yield running, read_fd, write_fd
        finally:
            stop.set()
            os.close(read_fd)
            os.close(write_fd)


def _own_error(running: "Future[ProgramResult]") -> str:
    try:
        return running.result(END_TIMEOUT_S).error
    except TimeoutError:
        return ""  # it only closed its pipes


def _run_test(test: str, read_fd: int, write_fd: int, limits: Limits) -> str:
    """Return the error; empty if passed."""
    call = f"run_test({test!r}, {read_fd}, {write_fd}, {limits.timeout_s}, {STARTUP_TIMEOUT_S})"
    patient = limits.model_copy(update={"timeout_s": limits.timeout_s + STARTUP_TIMEOUT_S})
    error = run_python(f"{_peer_source()}\n{call}", limits=patient, pass_fds=(read_fd, write_fd)).error
    return error.removeprefix("TimeoutError: ")


def _peer_source() -> str:
    return _source("peer.py")


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
    try:
        peer = connect(read_fd, write_fd, limits.timeout_s, STARTUP_TIMEOUT_S)
        function = peer.request("global", name)["value"]
        return "" if function(*args, **kwargs) == expected else "AssertionError"
    except KeyError:
        return f"NameError: the program defines no {name}"
    except TimeoutError as error:
        return str(error)
    except Exception as error:  # a program may send anything
        return f"{type(error).__name__}: {error}"
