import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from offbeat.deploy.local.parent_guard import guard_command
from tests.waiting import wait_until_sync

ORPHAN_MAKER = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)  # its child becomes an orphan in a session of its own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as out:
    out.write(f"{os.getpid()}\\n")
time.sleep(60)
"""
GUARDING_PARENT = """
import subprocess, sys
from offbeat.deploy.local.parent_guard import guard_command
subprocess.run(guard_command(sys.argv[1:]))
"""


def test_no_descendant_of_a_guarded_command_outlives_a_killed_parent(tmp_path: Path):
    pids = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", GUARDING_PARENT, sys.executable, "-c", ORPHAN_MAKER, str(pids)], start_new_session=True
    )
    wait_until_sync(lambda: pids.exists() and len(pids.read_text().splitlines()) == 2)
    processes = [psutil.Process(int(line)) for line in pids.read_text().splitlines()]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_a_guard_exits_with_its_command_and_ignores_signals(tmp_path: Path):
    """Signals are ignored while the parent lives."""
    started = tmp_path / "started"
    command = f"import pathlib, sys; pathlib.Path({str(started)!r}).touch(); sys.stdin.read(); sys.exit(3)"
    guard = subprocess.Popen(guard_command([sys.executable, "-c", command]), stdin=subprocess.PIPE)
    assert guard.stdin is not None
    wait_until_sync(started.exists)
    guard.terminate()
    guard.stdin.close()
    assert guard.wait(30) == 3
