"""Chaos: its plan is fixed by the seed, it strikes what it names, and it passes only where nothing is wrong."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from deploy.chaos.faults import FAULTS, Fault, plan, processes_of, strike
from deploy.chaos.running import ChaosReport, Struck
from tests.waiting import wait_until_sync


def test_the_seed_fixes_the_order_and_every_kind_comes_as_often():
    assert plan(40, 3) == plan(40, 3) != plan(40, 4)
    counts = Counter(fault.name for fault in plan(2 * len(FAULTS) + 5, 1))
    assert set(counts.values()) == {2, 3}
    assert len(plan(7, 1)) == 7


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "victim-of-chaos"])
    yield process
    process.kill()
    process.wait()


def test_a_victim_is_found_by_its_command_line_and_killed(child: subprocess.Popen[bytes]):
    (victim,) = processes_of(psutil.Process(), "victim-of-chaos")
    assert victim.pid == child.pid
    assert strike(Fault("kill", "victim-of-chaos"), victim, random.Random(1)) == 0.0
    assert child.wait(10) == -9
    assert processes_of(psutil.Process(), "victim-of-chaos") == []


def test_a_stopped_victim_goes_on_afterwards(child: subprocess.Popen[bytes]):
    seen: list[str] = []
    victim = psutil.Process(child.pid)

    def sleep(_: float) -> None:
        wait_until_sync(lambda: victim.status() == psutil.STATUS_STOPPED)
        seen.append(victim.status())

    assert 2 <= strike(Fault("stop", "victim", stops=True), victim, random.Random(1), sleep) <= 8
    wait_until_sync(lambda: victim.status() != psutil.STATUS_STOPPED)
    assert seen == [psutil.STATUS_STOPPED]


def test_a_report_passes_only_where_nothing_is_wrong():
    good = ChaosReport(1, [Struck("a", 0.0, 3, next_step_s=2.0)], exit_code=0, audit={"proven": True})
    assert good.passed
    assert good.as_tree()["by_kind"] == {"a": {"count": 1, "back_s": None, "two_steps_s": {"median": 2.0, "max": 2.0}}}
    for wrong in (
        {"exit_code": 1},
        {"exit_code": None},
        {"audit": {"proven": False}},
        {"leftovers": ["process 7"]},
        {"complaints": ["no"]},
    ):
        assert not ChaosReport(**{"seed": 1, "exit_code": 0, "audit": {"proven": True}, **wrong}).passed
