"""The ends of agents: their time, and processes in sessions of their own, which hold pipes open and are not killed."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.agents.pool import AgentOutcome, AgentPool
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.config import AgentRunner
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


WAITS = "import os, time; open(os.environ['OFFBEAT_TEST_MARKER'], 'w').close(); time.sleep(1000)"


@pytest.mark.parametrize(
    "named", [{"path": "tests.played_agents:hangs_with_child"}, {"command": (sys.executable, "-c", WAITS)}]
)
async def test_an_agents_time_stands_still_while_all_engines_sleep(
    named: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    marker, clock = tmp_path / "marker", AwakeClock()
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(marker))
    pool, task = AgentPool(clock), AgentTask("", "", "", "", "policy", "Tag", 1, "", "", 3)
    with clock.stopped():
        running = asyncio.create_task(pool.run(AgentRunner(**named, timeout_s=0.01), task))
        await wait_until(marker.exists)  # takes longer than its limit
    with pytest.raises(EpisodeError, match="agent_timeout"):
        await running
    await pool.close()


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        ("leaves_daemon", AgentOutcome(1.0)),
        ("hangs_with_daemon", "agent_timeout: no answer in 0.01 s"),
        ("crashes_with_daemon", "agent_crashed: exit status 3"),
    ],
)
async def test_an_agent_ends_before_the_daemon_that_it_leaves(
    function: str, outcome: AgentOutcome | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    daemon, clock = tmp_path / "pid", AwakeClock()
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(daemon))
    pool, task = AgentPool(clock), AgentTask("", "", "", "", "policy", "Tag", 1, "", "", 3)
    runner = AgentRunner(path=f"tests.played_agents:{function}", timeout_s=0.01 if "hangs" in function else 60.0)
    with clock.stopped():
        running = asyncio.create_task(pool.run(runner, task))
        await wait_until(daemon.exists)
    try:
        async with asyncio.timeout(PATIENCE_S):
            try:
                result = await running
            except EpisodeError as error:
                result = str(error)
            await pool.close()
        assert result == outcome
    finally:
        os.kill(int(daemon.read_text()), signal.SIGKILL)
