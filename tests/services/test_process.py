import os
import signal
import socket
import subprocess
import sys

import pytest

from offbeat.services.process import JsonLines, free_port, terminate

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


def test_imports_are_exempt_from_collections_and_what_runs_later_is_not():
    program = """
import gc
from offbeat.services.process import uncollected_imports
before = gc.get_freeze_count()
with uncollected_imports():
    assert not gc.isenabled()
    import asyncio
frozen = gc.get_freeze_count()
assert frozen > before and gc.isenabled()
later = [[]]
with uncollected_imports():
    import asyncio
assert gc.get_freeze_count() == frozen, "nothing was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_process_imports_the_standard_library_alone():
    code = "import sys, offbeat.services.process; print(*{'psutil', 'redis', 'numpy', 'msgspec'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print('up', flush=True); time.sleep(100)"


@pytest.mark.parametrize(("handler", "is_graceful"), [("signal.SIG_DFL", True), ("signal.SIG_IGN", False)])
def test_terminate_kills_a_child_that_ignores_sigterm(handler: str, is_graceful: bool):
    child = subprocess.Popen([sys.executable, "-c", STUBBORN.format(handler)], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert terminate(child, 0.5 if not is_graceful else 30.0) == is_graceful
    assert child.returncode == (-signal.SIGTERM if is_graceful else -signal.SIGKILL)


ECHO = """
import sys
from offbeat.services.process import JsonLines, claim_stdout
pipe = JsonLines(sys.stdin.buffer, claim_stdout())
print("output of a library")
while (message := pipe.receive()) is not None:
    pipe.send({"echo": message})
"""


def test_json_lines_are_exchanged_until_one_end_is_closed():
    command = [sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        pipe = JsonLines(child.stdout, child.stdin)
        for message in ({"text": "zwei\\nZeilen"}, {"n": [1, None]}):
            assert pipe.send(message)
            assert pipe.receive() == {"echo": message}
        pipe.close()
        assert pipe.receive() is None
        assert child.wait(30) == 0
        assert child.stderr.read() == b"output of a library\n"


def test_json_lines_reject_what_is_no_object_and_report_a_closed_pipe():
    read, write = os.pipe()
    with os.fdopen(read, "rb") as source, os.fdopen(write, "wb") as sink:
        sink.write(b"[1]\nnonsense\n")
        sink.flush()
        pipe = JsonLines(source, sink)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"JSON|Expecting"):
                pipe.receive()
    read, write = os.pipe()
    os.close(read)
    with open(os.devnull, "rb") as source, os.fdopen(write, "wb", buffering=0) as sink:
        assert not JsonLines(source, sink).send({})
