"""What programs take or leave behind: processes, memory, files and output are bounded, and all ends with the program."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from offbeat.envs.sandbox import Limits, run_python
from offbeat.envs.sandbox.run import Layer
from tests.envs.sandbox.attacks import CALL, CONTAINER, FULL, NO_FILTERS, attack, held
from tests.envs.sandbox.needs import needs_sandbox
from tests.waiting import wait_until_sync

pytestmark = [needs_sandbox, pytest.mark.slow]


LEAVES = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv(%r, [%r, "600"])
    os._exit(0)
print("left", flush=True)
time.sleep(%d)
"""


@pytest.mark.parametrize("stays_s", [0, 600], ids=["and ends", "and stays"])
@pytest.mark.parametrize("layers", [FULL, NO_FILTERS], ids="+".join)
def test_a_daemon_that_ignores_every_signal_ends_with_its_program(layers: tuple[Layer, ...], stays_s: int):
    mark = f"offbeat-daemon-{os.getpid()}-{stays_s}-{len(layers)}"
    code = LEAVES % ("/usr/bin/sleep", mark, stays_s)
    limits = Limits(timeout_s=12, max_processes=8)
    assert attack(code, layers, limits) == "left"
    wait_until_sync(lambda: not running(mark))


def test_a_program_dies_with_its_caller(tmp_path: Path):
    mark = f"offbeat-orphan-{os.getpid()}"
    limits = "Limits(timeout_s=600, max_processes=8)"
    asks = (
        f"from offbeat.envs.sandbox import *; run_python({LEAVES % ('/usr/bin/sleep', mark, 600)!r}, limits={limits})"
    )
    held(FULL)
    # Nobody is left to remove the program's folder.
    asker = subprocess.Popen([sys.executable, "-c", asks], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_until_sync(lambda: bool(running(mark)))
    finally:
        asker.send_signal(signal.SIGKILL)
        asker.wait()
    wait_until_sync(lambda: not running(mark))


FORKS = """
import os, time
made = 0
try:
    while made < 500:
        if not os.fork():
            time.sleep(60)
        made += 1
except OSError as error:
    print(made, type(error).__name__)
"""


@pytest.mark.parametrize(("max_processes", "made"), [(1, 0), (8, 7)])
def test_a_fork_bomb_makes_no_more_processes_than_allowed(max_processes: int, made: int):
    output = attack(FORKS, limits=Limits(max_processes=max_processes))
    assert output in (f"{made} PermissionError", f"{made} BlockingIOError")
    if max_processes == 1:
        assert attack(FORKS, CONTAINER) == output


MEMORY = {
    "its own": "x = b'x' * (600 << 20)",
    "memfd": "import os\nfor n in range(100): os.write(os.memfd_create('x'), b'x' * (8 << 20))\nx = b'x' * (600 << 20)",
    "System V": CALL + "assert libc.shmget(0, 100 << 20, 0o1600) >= 0",
    "many processes": "import os\nos.fork(); os.fork(); x = b'x' * (300 << 20)",
    "threads": "import threading, time\n"
    + "for n in range(500): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}


@pytest.mark.parametrize("attack_name", MEMORY)
def test_memory_of_every_kind_is_bounded(attack_name: str):
    limits = Limits(max_processes=4 if attack_name == "many processes" else 1, timeout_s=10)
    output = attack(MEMORY[attack_name], limits=limits)
    assert output.startswith(("MemoryError", "PermissionError", "AssertionError", "RuntimeError: can't start")), output


FILES = """
made = 0
try:
    while made < 100_000:
        with open(str(made), "wb") as file:
            file.write(bytes({size}))
        made += 1
except OSError as error:
    import errno
    print(made, errno.errorcode[error.errno])
"""


def test_files_are_bounded_in_number_and_in_sum():
    many, code = attack(FILES.format(size=1), limits=Limits(max_files=200)).split()
    assert (int(many) < 200, code) == (True, "ENOSPC")
    big, code = attack(FILES.format(size=1 << 20), limits=Limits(disk_mib=16)).split()
    assert (int(big) <= 16, code) == (True, "ENOSPC")


def test_endless_output_ends_and_is_cut():
    outcome = run_python("import os\nwhile True: os.write(1, b'x' * 65536)", limits=Limits(file_mib=1))
    assert not outcome.ok
    assert len(outcome.stdout) < 11_000
    assert len(outcome.stderr) < 11_000


def running(mark: str) -> list[int]:
    """Processes with the mark on their command line, zombies aside (theirs is empty)."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0].startswith(mark)
    ]
