"""The soak: growth is found where there is some, and only there."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from offbeat.benchmarks.chaos.memory import (
    EVERYTHING,
    MemoryLog,
    Series,
    growth,
    kind_of,
)
from offbeat.benchmarks.chaos.soak import SoakReport, _check_growth
from tests.waiting import wait_until_sync

Memory = npt.NDArray[np.float64]


HOURS = np.linspace(1 / 3, 1.0, 480)
"""The last two thirds of an hour."""
LIMIT = 9.2
"""2 % of the 460 MiB that all below start with."""


def lasting(rng: np.random.Generator, minutes: float, size: float) -> Memory:
    """Noise that remembers itself for so long, as a heap does."""
    keeps = np.exp(-40 / len(HOURS) / minutes)
    noise = rng.normal(0.0, size * np.sqrt(1 - keeps**2), len(HOURS))
    for i in range(1, len(HOURS)):
        noise[i] += keeps * noise[i - 1]
    return noise


MAX_COST_SPREAD: dict[str, Callable[[np.random.Generator], Memory]] = {
    "measured": lambda rng: rng.normal(0.0, 2.0, len(HOURS)),
    "restless": lambda rng: lasting(rng, 0.5, 5.0),
    "swings for minutes": lambda rng: lasting(rng, 2.0, 10.0),
    "there and back": lambda rng: (
        20 * np.sin(2 * np.pi * (4 * HOURS + rng.random())) + rng.normal(0.0, 1.0, len(HOURS))
    ),
    "collected now and then": lambda rng: 40 * ((60 / 7 * HOURS + rng.random()) % 1),
    "fills up": lambda rng: -50 * np.exp(-6 * HOURS) + rng.normal(0.0, 1.0, len(HOURS)),
}
GROWING: dict[str, Callable[[np.random.Generator], Memory]] = {
    "30 MiB an hour": lambda _: 30 * HOURS,
    "10 MiB every ten minutes": lambda rng: 10 * np.floor(6 * HOURS + rng.random()),
    "slower and slower, without end": lambda _: 60 * np.log(HOURS),
}


def how_often(series: Callable[[np.random.Generator], Memory], runs: int = 40) -> float:
    trends = [growth(HOURS.tolist(), (460 + series(np.random.default_rng(seed))).tolist()) for seed in range(runs)]
    return sum(trend is not None and trend.exceeds(LIMIT) for trend in trends) / runs


def test_a_straight_line_is_found_exactly():
    hours = np.arange(60) / 60
    trend = growth(hours.tolist(), (3.0 + 4.0 * hours).tolist())
    assert trend is not None
    assert (trend.per_hour, trend.late) == (pytest.approx(4.0, rel=0.02), pytest.approx(4.0, rel=0.02))
    assert trend.error < 0.1
    assert trend.exceeds(3.5)
    assert not trend.exceeds(4.5)


def test_a_short_time_shows_nothing():
    assert growth([0.0, 0.1, 0.2], [1.0, 2.0, 3.0]) is None
    report = SoakReport(1.0)
    _check_growth(report, [Series("quick", 1, [0.0, 0.1], [1.0, 2.0], [7, 7])], 0.1)
    assert not report.passed


@pytest.mark.parametrize("noise", MAX_COST_SPREAD)
def test_oscillating_or_saturating_memory_does_not_count_as_growth(noise: str):
    assert how_often(MAX_COST_SPREAD[noise]) <= 0.05


@pytest.mark.parametrize("leak", GROWING)
@pytest.mark.parametrize("noise", ["measured", "restless", "fills up"])
def test_growth_of_any_shape_is_detected(noise: str, leak: str):
    assert how_often(lambda rng: MAX_COST_SPREAD[noise](rng) + GROWING[leak](rng)) >= 0.6


@pytest.mark.parametrize("noise", ["swings for minutes", "there and back", "collected now and then"])
def test_growth_is_detected_despite_smaller_oscillation(noise: str):
    assert how_often(lambda rng: MAX_COST_SPREAD[noise](rng) + 80 * HOURS) >= 0.8


def test_a_child_that_grows_is_measured_by_itself():
    code = (
        "import sys; sys.stdin.readline(); x = bytearray(b'1') * 2**25; print(len(x), flush=True); sys.stdin.readline()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        root = psutil.Process(child.pid)
        wait_until_sync(lambda: bool(root.cmdline()))
        log = MemoryLog()  # its clock starts here: only what is there in the first third counts
        log.sample([root])
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        log.sample([root])
    finally:
        child.kill()
        child.wait()
    everything, alone = log.lasting_series()
    assert (everything.kind, alone.pid) == (EVERYTHING, child.pid)
    assert 30 < alone.mib[1] - alone.mib[0] < 40
    assert everything.mib == alone.mib


def test_a_process_that_grows_fails_the_soak_by_name():
    for kind, per_hour in (("steady", 0.0), ("leaks", 30.0)):
        hours = np.linspace(0.0, 1.0, 720)
        mib = 460 + per_hour * hours + np.random.default_rng(3).normal(0.0, 1.0, 720)
        report = SoakReport(60.0)
        _check_growth(report, [Series(kind, 1, hours.tolist(), mib.tolist(), [7] * 720)], 1.0)
        assert report.passed == (kind == "steady")
        assert report.rows[0]["grows"] == (kind == "leaks")
        assert all(kind in complaint for complaint in report.complaints)


def test_processes_have_names_for_people():
    assert kind_of(["ray::EnvWorkerActor"]) == "env worker"
    assert kind_of(["/x/raylet/raylet", "--raylet_socket"]) == "raylet"
    assert kind_of(["python", "-m", "offbeat.trainer.cli", "run"]) == "learner"
    assert kind_of([]) == "?"
