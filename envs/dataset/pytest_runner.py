# pyright: basic
"""Runner of a pytest file against the program of a peer, in the sandbox, after the sources of `peer` and `bindings`.

It prints the number of tests, then a dot for each that passes and an s for each that the file marks as skipped or failing.
"""

import ast
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.envs.dataset.bindings import PROGRAM_MODULES, bind
    from offbeat.envs.dataset.peer import connect

OPTIONS = ("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--noconftest")


class Outcomes:
    """Plugin that writes to an uncaptured descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_collection_finish(self, session) -> None:
        self._write(f"{len(session.items)} ")

    def pytest_runtest_logreport(self, report) -> None:
        marks = {"skip", "skipif"} if report.when == "setup" else {"__unittest_skip__"}
        is_skipped = report.skipped and not marks.isdisjoint(report.keywords)
        is_xfail = report.when != "teardown" and hasattr(report, "wasxfail") and "xfail" in report.keywords
        if is_skipped or is_xfail:
            self._write("s")
        elif report.when == "call" and report.passed:
            self._write(".")

    def _write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())


def run_pytest(test: str, read_fd: int, write_fd: int, timeout_s: float, startup_timeout_s: float) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest  # noqa: PLC0415

    peer = connect(read_fd, write_fd, timeout_s, startup_timeout_s)
    tree = ast.parse(test)
    program, libraries = bind(peer, test)
    used = {**libraries, **program}
    public = sorted(name for name in used if not name.startswith("_"))
    if imports_program(tree):
        for name in peer.request("names"):
            ((kind, value),) = peer.request("global", name).items()
            if kind == "value" and not name.startswith("__"):
                program[name] = value
    if not program:
        raise NameError("the tests use nothing that the program defines")
    module = types.ModuleType(PROGRAM_MODULES[0])
    module.__dict__.update({**program, **used}, __all__=public)
    sys.modules.update(dict.fromkeys(PROGRAM_MODULES, module))
    lines = test.splitlines()
    start = max((node.end_lineno or 0 for node in tree.body if is_future_import(node)), default=0)
    imports = [f"from {PROGRAM_MODULES[0]} import {name}" for name in used]
    Path("test_program.py").write_text("\n".join([*lines[:start], *imports, *lines[start:], ""]), encoding="utf-8")
    pytest.main([*OPTIONS, "test_program.py"], plugins=[Outcomes(os.dup(1))])


def imports_program(tree: ast.Module) -> bool:
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return bool(set(PROGRAM_MODULES) & (names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}))


def is_future_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
