"""Times of parts within a process, read by another one."""

import time
from pathlib import Path

import pytest

from offbeat.benchmarks.turn.part_times import PartTime, PartTimes


class Work:
    def outer(self) -> str:
        self.inner()
        burn(0.02)
        return "done"

    def inner(self) -> None:
        burn(0.06)

    def fail(self) -> None:
        raise ValueError("no")


def burn(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def test_a_part_is_timed_without_the_parts_inside_it(tmp_path: Path) -> None:
    class Measured(Work):
        """A class of its own, which the test may change."""

    writer = PartTimes(tmp_path / "times", ("outside", "inside"))
    reader = PartTimes(tmp_path / "times", ("outside", "inside"))
    writer.measure(Measured, "outer", "outside")
    writer.measure(Measured, "inner", "inside")
    began, spent = time.perf_counter(), time.thread_time()
    assert Measured().outer() == "done"
    spent, wall_s = time.thread_time() - spent, time.perf_counter() - began
    outside, inside = reader.read()["outside"], reader.read()["inside"]
    assert outside.calls == inside.calls == 1
    assert outside.cpu_s >= 0.02
    assert inside.cpu_s >= 0.06
    assert outside.cpu_s + inside.cpu_s <= spent
    assert outside.wall_s + inside.wall_s <= wall_s


def test_a_function_that_raises_is_timed_too(tmp_path: Path) -> None:
    class Measured(Work):
        """As above."""

    times = PartTimes(tmp_path / "times", ("part",))
    times.measure(Measured, "fail", "part")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            Measured().fail()
    assert times.read()["part"].since(PartTime(1.0)).calls == 1
