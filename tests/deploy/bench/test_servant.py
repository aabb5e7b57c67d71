"""An object in a process of its own."""

import os
from pathlib import Path

import pytest

from deploy.bench.servant import Servant


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

    def close(self) -> None: ...


def test_calls_are_answered_by_another_process_that_keeps_its_state(tmp_path: Path) -> None:
    with Servant(Adder(3), tmp_path / "log") as adder:
        assert adder.call("add", 4)[0] == 7
        total, pid = adder.call("add", 1)
    assert total == 8
    assert pid != os.getpid()
    assert "noise on stdout" in (tmp_path / "log").read_text()


def test_what_a_servant_raises_at_its_start_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ValueError: starts below zero"), Servant(Adder(-1), tmp_path / "log"):
        pass
