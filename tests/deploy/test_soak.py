"""The soak: growth is found where there is some, and only there."""

import subprocess
import sys

import numpy as np
import psutil
import pytest

from deploy.chaos.memory import EVERYTHING, MemoryLog, growth, kind_of
from deploy.chaos.soak import SoakReport, _judge
from tests.waiting import wait_until_sync


def walk(slope: float, noise: float, seed: int, n: int = 240) -> tuple[list[float], list[float]]:
    """An hour of measurements whose noise lasts for some of them, as that of memory does."""
    rng = np.random.default_rng(seed)
    hours = np.linspace(0.0, 1.0, n)
    lasting = np.zeros(n)
    for i in range(1, n):
        lasting[i] = 0.5 * lasting[i - 1] + rng.normal(0.0, noise)
    return hours.tolist(), (100.0 + slope * hours + lasting).tolist()


def test_the_slope_of_a_straight_line_is_exact():
    found = growth([0.0, 0.25, 0.5, 1.0], [3.0, 4.0, 5.0, 7.0])
    assert found.per_hour == pytest.approx(4.0)
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert found.is_there


def test_the_error_covers_the_true_slope_as_often_as_it_should():
    """Of 400 series, 19 in 20 lie within two standard errors; a few percent less for a lag that is chosen, not known."""
    inside = 0
    for seed in range(400):
        found = growth(*walk(slope=2.0, noise=1.0, seed=seed))
        inside += abs(found.per_hour - 2.0) < 2 * found.error
    assert 0.85 < inside / 400 < 0.99


def test_a_leak_is_told_from_noise():
    assert growth(*walk(slope=8.0, noise=1.0, seed=1)).is_there
    assert not growth(*walk(slope=0.0, noise=1.0, seed=2)).is_there


def test_a_child_that_grows_is_measured_by_itself():
    code = (
        "import sys; sys.stdin.readline(); x = bytearray(b'1') * 2**25; print(len(x), flush=True); sys.stdin.readline()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = MemoryLog()
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        root = psutil.Process(child.pid)
        wait_until_sync(lambda: bool(root.cmdline()))
        log.sample([root])
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        log.sample([root])
        log.sample([root], {log.lasting()[1].kind: 20.0})
    finally:
        child.kill()
        child.wait()
    everything, alone = log.lasting()
    assert (everything.kind, alone.pid) == (EVERYTHING, child.pid)
    assert 30 < alone.mib[1] - alone.mib[0] < 40
    assert everything.mib == alone.mib
    assert 15 < alone.mib[1] - alone.mib[2] < 25, "what is bounded is not counted"


def test_a_process_that_surely_grows_fails_the_soak():
    log = MemoryLog()
    for kind, slope in (("steady", 0.0), ("leaks", 30.0)):
        series = log.lasting()[0].__class__(kind, 1)
        series.hours, series.mib = walk(slope=slope, noise=1.0, seed=3)
        series.files = [7] * len(series.mib)
        report = SoakReport(60.0)
        _judge(report, [series], 1.0)
        assert report.passed == (kind == "steady")
        assert report.rows[0]["grows"] == (kind == "leaks")


def test_processes_have_names_for_people():
    assert kind_of(["ray::EnvWorkerActor"]) == "env worker"
    assert kind_of(["/x/raylet/raylet", "--raylet_socket"]) == "raylet"
    assert kind_of(["python", "-m", "trainer.cli", "run"]) == "learner"
    assert kind_of([]) == "?"
