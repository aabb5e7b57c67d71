import asyncio
import sys
from pathlib import Path

import pytest

from offbeat.deploy.tinker import child
from offbeat.services.errors import MeshError
from tests.waiting import wait_until

COUNT_STARTS = "import os, sys; open(sys.argv[1], 'a').write('x'); "


def supervised(tmp_path: Path, end: str) -> child.SupervisedChild:
    command = [sys.executable, "-c", COUNT_STARTS + end, str(tmp_path / "starts")]
    return child.SupervisedChild("engine", command, b"", tmp_path / "log")


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STEADY_S", 0.0)
    monkeypatch.setattr(child, "MAX_BACKOFF_S", 0.0)


async def test_errors_that_return_after_a_long_start_end_the_server(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=rf"the engine died 8 times in a row, last with status 1: see {tmp_path}/log"):
        await supervised(tmp_path, "sys.exit(1)").supervise()
    assert len((tmp_path / "starts").read_text()) == child.MAX_DEATHS


async def test_a_child_that_is_killed_is_restarted_for_as_long_as_it_comes_up(tmp_path: Path) -> None:
    supervision = asyncio.create_task(supervised(tmp_path, "os.kill(os.getpid(), 9)").supervise())
    starts = tmp_path / "starts"
    await wait_until(lambda: starts.exists() and len(starts.read_text()) > child.MAX_DEATHS + 2, timeout_s=120)
    supervision.cancel()
    await asyncio.gather(supervision, return_exceptions=True)
