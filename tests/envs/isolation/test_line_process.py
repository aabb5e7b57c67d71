import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil

from offbeat.envs.isolation.line_process import LineProcess, LineProcesses

ECHO = """
import sys
print("true", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
MEET = """
import json, pathlib, sys, time
print("true", flush=True)
for line in sys.stdin:
    own, other = map(pathlib.Path, json.loads(line))
    own.touch()
    while not other.exists():
        time.sleep(0.01)
    print("1", flush=True)
"""
"""Answers once another process has the other's request."""


def test_a_process_that_was_killed_while_idle_answers_the_next_request():
    others = psutil.Process().children()
    with closing(LineProcess([sys.executable, "-c", ECHO], "did not start")) as process:
        assert process.ask(1) == 1
        [child] = set(psutil.Process().children()) - set(others)
        child.kill()
        psutil.wait_procs([child], timeout=20)
        assert process.ask(2) == 2


def test_requests_that_overlap_go_to_processes_of_their_own(tmp_path: Path):
    processes = LineProcesses([sys.executable, "-c", MEET], "did not start", num_processes=2)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(processes.ask, ([first, second], [second, first]), timeout=60)) == [1, 1]
