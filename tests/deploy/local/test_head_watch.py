"""A killed process of Ray's head is reported, one that is ended on purpose is not."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.deploy.local.head_watch import HeadWatch
from tests.waiting import wait_until_sync

Head = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """Start processes by the names of Ray's."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> "subprocess.Popen[bytes]":
        program = Path(shutil.copy(shutil.which("sleep") or "", tmp_path / name))
        started.append(subprocess.Popen([program, "1000"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def deaths() -> list[str]:
    return []


@pytest.fixture
def watch(deaths: list[str]) -> Iterator[HeadWatch]:
    watch = HeadWatch(deaths.append)
    watch.start()
    yield watch
    watch.stop()


@pytest.mark.parametrize("is_up", [False, True])
def test_a_killed_process_is_reported_also_while_the_head_starts(
    watch: HeadWatch, deaths: list[str], head: Head, is_up: bool
):
    gcs = head("gcs_server")
    if is_up:
        head("raylet")
    wait_until_sync(lambda: len(watch._head) == 1 + is_up)
    gcs.kill()
    wait_until_sync(lambda: deaths == ["Ray's gcs_server was killed"])


def test_a_head_that_is_ended_on_purpose_is_replaced_by_the_next(watch: HeadWatch, deaths: list[str], head: Head):
    first = head("raylet")
    wait_until_sync(lambda: "raylet" in watch._head)
    with watch.suspended():
        first.kill()
        first.wait()
    second = head("raylet")
    wait_until_sync(lambda: "raylet" in watch._head)
    assert deaths == []
    second.kill()
    wait_until_sync(lambda: deaths == ["Ray's raylet was killed"])
