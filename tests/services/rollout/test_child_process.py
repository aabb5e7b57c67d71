"""Ends of child processes."""

import asyncio
import os
import signal
import sys

import pytest

from offbeat.services.rollout.child_process import end_child
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

LEAVES_DAEMON = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
time.sleep(1000)
"""


async def test_a_daemon_that_holds_a_full_stdin_delays_nobody():
    """It is in a session of its own, so it is not killed."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LEAVES_DAEMON), stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert child.stdin
    assert child.stdout
    daemon = int(await child.stdout.readline())
    child.stdin.write(bytes(1 << 20))  # more than the pipe holds
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await end_child(child, None) == -signal.SIGKILL
    finally:
        os.kill(daemon, signal.SIGKILL)
