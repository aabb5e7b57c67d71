import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil

from offbeat.envs.isolation.line_process import LineProcess, LineProcesses
from tests.waiting import wait_until_sync

ECHO = """
import sys
print("true", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
MEETING = Path(__file__).with_name("meeting.py")


def test_a_process_that_was_killed_while_idle_answers_the_next_request():
    others = psutil.Process().children()
    with closing(LineProcess([sys.executable, "-c", ECHO], "did not start")) as process:
        assert process.ask(1) == 1
        [child] = set(psutil.Process().children()) - set(others)
        child.kill()
        psutil.wait_procs([child], timeout=20)
        assert process.ask(2) == 2


def test_requests_that_overlap_go_to_processes_of_their_own(tmp_path: Path):
    processes = LineProcesses([sys.executable, str(MEETING)], "did not start", num_processes=2)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with closing(processes), ThreadPoolExecutor(2) as threads:
        assert list(threads.map(processes.ask, ([first, second], [second, first]))) == [True, True]


def test_a_busy_process_can_be_closed(tmp_path: Path):
    process = LineProcess([sys.executable, str(MEETING)], "did not start")
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(process.ask, [str(tmp_path / "asked"), str(tmp_path / "never")])
        wait_until_sync((tmp_path / "asked").exists)
        began = time.monotonic()
        process.close()
        assert time.monotonic() - began < 20
        assert reply.result() is None
