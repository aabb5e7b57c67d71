"""A process of a benchmark's own, and an object in it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from offbeat.benchmarks.harness.process_actor import ProcessActor
from tests.paths import ROOT
from tests.processes import has_ended
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(120)


class Adder:
    """Counts, and says where."""

    def __init__(self, first: int) -> None:
        self.total = first

    async def start(self) -> None:
        if self.total < 0:
            raise ValueError("starts below zero")

    async def add(self, number: int) -> tuple[int, int]:
        print("noise on stdout")  # noqa: T201
        self.total += number
        return self.total, os.getpid()

    async def die(self) -> None:
        print("last words", flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL)

    async def hang(self) -> None:
        await asyncio.sleep(100)

    def close(self) -> None: ...


class Falling(Adder):
    """Is killed while it ends: it was asked to, and did not get to it."""

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def kill(pid: int) -> None:
    """Return when it has ended, without a waiter."""
    os.kill(pid, signal.SIGKILL)
    wait_until_sync(lambda: has_ended(pid))


def add_after_death(adder: ProcessActor) -> None:
    kill(adder.pid)
    adder.call("add", 1)


PARENT = """
    from pathlib import Path
    from offbeat.benchmarks.harness.process_actor import ProcessActor
    from tests.benchmarks.harness.test_child_process import Adder

    if __name__ == "__main__":
        with ProcessActor(Adder(0), Path({log!r})) as adder:
            print(adder.pid, flush=True)
            adder.call("hang")
"""


def test_calls_are_answered_by_another_process_that_keeps_its_state(tmp_path: Path) -> None:
    with ProcessActor(Adder(3), tmp_path / "log") as adder:
        assert adder.call("add", 4)[0] == 7
        total, pid = adder.call("add", 1)
    assert total == 8
    assert pid != os.getpid()
    assert "noise on stdout" in (tmp_path / "log").read_text()


def test_actor_raises_an_error_of_its_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ValueError: starts below zero"), ProcessActor(Adder(-1), tmp_path / "log"):
        pass


def test_call_raises_the_crash_and_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"code -9\nlast words"), ProcessActor(Adder(0), tmp_path / "log") as adder:
        adder.call("die")


def test_call_raises_a_crash_that_happened_before_it(tmp_path: Path) -> None:
    """Not by a broken pipe, which a command line takes for `| head` and keeps to itself."""
    with pytest.raises(RuntimeError, match="code -9"), ProcessActor(Adder(0), tmp_path / "log") as adder:
        add_after_death(adder)


def test_exit_raises_a_crash_after_the_last_call(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="code -9"), ProcessActor(Adder(0), tmp_path / "log") as adder:
        kill(adder.pid)


def test_exit_raises_a_crash_during_shutdown(tmp_path: Path) -> None:
    """The pipe of one that dies takes the goodbye for as long as a thread of it is left."""
    with pytest.raises(RuntimeError, match="code -9"), ProcessActor(Falling(0), tmp_path / "log") as adder:
        adder.call("add", 1)


def test_a_busy_process_dies_with_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(textwrap.dedent(PARENT.format(log=str(tmp_path / "log"))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_sync(lambda: has_ended(pid))
