import os
import time

import pytest

from envs.sandbox import Limits, run_python
from tests.waiting import wait_until_sync

SHORT = Limits(timeout_s=1.0)


def alive(mark: str) -> list[str]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                    text = file.read().decode(errors="replace")
            except OSError:
                continue
            if mark in text:
                found.append(text)
    return found


def test_a_program_reads_writes_and_ends():
    outcome = run_python("print(int(input()) * 2)", stdin="21")
    assert (outcome.stdout, outcome.stderr, outcome.ok, outcome.error) == ("42\n", "", True, "")
    assert run_python("import sys; sys.exit(3)").exit_code == 3


def test_what_a_program_raises_is_told_with_its_own_lines_alone():
    outcome = run_python("def f():\n    return 1 / 0\nf()")
    assert outcome.exit_code == 1
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert "child.py" not in outcome.stderr
    assert run_python("def").error.startswith("SyntaxError")


def test_endless_loops_and_sleeps_end_with_their_time():
    for code in ("while True: pass", "import time; time.sleep(60)"):
        began = time.monotonic()
        outcome = run_python(code, limits=SHORT)
        assert (outcome.timed_out, outcome.ok, outcome.error) == (True, False, "out of time")
        assert time.monotonic() - began < 20


def test_memory_files_and_output_are_limited():
    assert run_python("x = bytearray(10**9)", limits=Limits(memory_mib=128)).error == "MemoryError"
    written = run_python("open('big', 'wb').write(b'x' * 10**7)", limits=Limits(file_mib=1))
    assert not written.ok
    noisy = run_python("print('a' * 50_000)", limits=Limits(max_output_chars=1000))
    assert len(noisy.stdout) < 1100
    assert "characters left out" in noisy.stdout


def test_children_do_not_outlive_the_program_even_in_sessions_of_their_own():
    mark = f"offbeat-test-{os.getpid()}"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)  # {mark}'], start_new_session=True)\n"
    )
    outcome = run_python(code)
    if outcome.isolation == "namespaces":
        assert outcome.ok
    else:
        assert "not allowed" in outcome.error
    run_python(code + "import time; time.sleep(60)", limits=SHORT)
    wait_until_sync(lambda: not alive(mark))


def test_there_is_no_network_and_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OFFBEAT_SECRET", "x")
    outcome = run_python("import socket; socket.create_connection(('127.0.0.1', 80), timeout=2)")
    assert not outcome.ok
    assert "unreachable" in outcome.error or "not allowed" in outcome.error
    assert run_python("import os; print('OFFBEAT_SECRET' in os.environ, os.listdir())").stdout == "False []\n"
