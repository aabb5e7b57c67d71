"""Forks end, print and fail as `subprocess.Popen`'s processes do."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkedProcess
from tests.paths import ROOT

pytestmark = pytest.mark.slow
SHOW = (
    "import os, sys; print(__name__, sys.argv[1:], os.environ.get('SHOWN'), os.getcwd(), os.getsid(0) == os.getpid())"
)
FAIL = "import atexit, sys; atexit.register(print, 'at exit'); sys.exit({})"


def start_interpreter(arguments: list[object], **options: Any) -> "subprocess.Popen[bytes]":
    options["env"] = {**options["env"], "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *map(str, arguments)], **options)


STARTS: list[Callable[..., Any]] = [start_interpreter, ForkedProcess]


def outcome(start: Callable[..., Any], folder: Path, arguments: list[object]) -> tuple[int, str]:
    with (folder / "printed").open("wb") as out:
        options = {"env": {**os.environ, "SHOWN": "1"}, "stdout": out, "stderr": out, "start_new_session": True}
        code = start(arguments, **options).wait(timeout=120)
    return code, (folder / "printed").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", SHOW, "one", 2],
        ["script.py", "one"],
        ["-m", "tests.paths", "one"],
        ["-c", FAIL.format(3)],
        ["-c", FAIL.format("'a reason'")],
        ["-c", "import os; os.kill(os.getpid(), 15)"],
    ],
)
def test_a_fork_does_what_an_interpreter_does(
    arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SHOW)
    expected, found = (outcome(start, tmp_path, arguments) for start in STARTS)
    assert found == expected


@pytest.mark.parametrize("start", STARTS)
def test_a_process_is_signalled_while_it_runs(start: Callable[..., Any]) -> None:
    process = start(["-c", "import signal; signal.pause()"], env=os.environ)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.01)
    process.kill()
    assert process.wait() == process.returncode == -signal.SIGKILL
    process.kill()  # it has ended: nothing is signalled
