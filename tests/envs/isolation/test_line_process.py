import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offbeat.envs.isolation.line_process import LineProcesses

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


def test_requests_that_overlap_go_to_processes_of_their_own(tmp_path: Path):
    processes = LineProcesses([sys.executable, "-c", MEET], "did not start", num_processes=2)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(processes.ask, ([first, second], [second, first]), timeout=60)) == [1, 1]
