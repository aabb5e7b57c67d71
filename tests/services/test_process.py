import signal
import socket
import subprocess
import sys

import pytest

from offbeat.services.process import free_port

CHILD = """
import os, sys, time
from offbeat.services.process import die_with_parent
die_with_parent(int(sys.argv[1]) or os.getppid())
print(os.getpid(), flush=True)
time.sleep(100)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], '0'])"


def test_die_with_parent_kills_the_child_of_a_killed_parent():
    """The child holds the pipe: its end is the pipe's."""
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline())
        parent.kill()
        assert parent.stdout.read() == ""
    assert parent.returncode == -signal.SIGKILL


def test_die_with_parent_exits_when_the_parent_has_ended_already():
    """Process 1 stands for a parent that this child does not have any more."""
    child = subprocess.run([sys.executable, "-c", CHILD, "1"], check=False, capture_output=True, timeout=30)
    assert (child.returncode, child.stdout) == (1, b"")


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_free_port_can_be_bound(host: str):
    with socket.socket() as server:
        server.bind((host, free_port(host)))


def test_process_imports_the_standard_library_alone():
    code = "import sys, offbeat.services.process; print(*{'psutil', 'redis', 'numpy', 'msgspec'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
