"""What is left open where a process may open no more files."""

import subprocess
import sys

import pytest

from tests.envs.sandbox.needs import needs_sandbox

SCRIPT = """
import os, resource
from offbeat.envs.dataset.program_checker import check_program, count_pytest
from offbeat.envs.sandbox import Limits
from offbeat.envs.sandbox.shell import Shell, ShellLimits

def open_shell():
    Shell(("/app",), ShellLimits()).close()

def check(test):
    assert not check_program("def double(x): return 2 * x", test, Limits(timeout_s=60))

def count():
    tests = "from solution import double" + chr(10) + "def test(): assert double(1) == 2"
    assert count_pytest("def double(x): return 2 * x", tests, Limits(timeout_s=60)) == (1, 1)

act = {"equation": lambda: check("assert double(1) == 2"), "statements": lambda: check("x = double(1); assert x == 2"),
       "pytest": count, "shell": open_shell}[NAME]
act()  # what stays, such as the shells' thread and the imports, is open
before, hard = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
failures = 0
for room in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) - 1 + room, hard))
    try:
        act()
    except OSError:
        failures += 1
    except AssertionError:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert os.listdir("/proc/self/fd") == before, (room, before)
print(failures)
"""


@needs_sandbox
@pytest.mark.parametrize("name", ["equation", "statements", "pytest", "shell"])
def test_nothing_stays_open_if_no_more_files_can_be_opened(name: str):
    command = [sys.executable, "-c", SCRIPT.replace("NAME", repr(name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
