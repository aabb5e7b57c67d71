import time
from pathlib import Path

import pytest

from offbeat.envs.sandbox import (
    IsolationError,
    Limits,
    check_isolation,
    describe_missing,
    platform_isolation,
    run_python,
)
from offbeat.envs.sandbox.run import SUPERVISOR_CODE
from tests.envs.sandbox.needs import needs_sandbox

pytestmark = needs_sandbox
SHORT = Limits(timeout_s=1.0)


def test_a_program_reads_writes_and_ends():
    outcome = run_python("print(int(input()) * 2)", stdin="21")
    assert (outcome.stdout, outcome.stderr, outcome.ok, outcome.error) == ("42\n", "", True, "")
    assert run_python("import sys; sys.exit(3)").exit_code == 3


def test_a_traceback_has_only_the_programs_lines():
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


@pytest.mark.parametrize("failure", ["raise BlockingIOError(11, 'no process')", "import os; os.kill(os.getpid(), 9)"])
def test_a_supervisor_that_fails_is_no_verdict_on_the_program(failure: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.envs.sandbox.run.SUPERVISOR_CODE", failure)
    with pytest.raises(OSError, match="ended without a result"):
        run_python("print(1)")
    platform_isolation.cache_clear()
    with pytest.raises(OSError, match="ended without a result"):
        check_isolation(Limits())
    monkeypatch.undo()
    check_isolation(Limits())


def test_a_program_that_ends_before_it_is_confined_is_not_judged(monkeypatch: pytest.MonkeyPatch):
    """Less memory is left than the sandbox's limit."""
    low = f"import resource; resource.setrlimit(resource.RLIMIT_AS, 2 * (300 << 20,)); {SUPERVISOR_CODE}"
    monkeypatch.setattr("offbeat.envs.sandbox.run.SUPERVISOR_CODE", low)
    with pytest.raises(OSError, match="ended without a result: ValueError"):
        run_python("print(1)")
    platform_isolation.cache_clear()
    with pytest.raises(OSError, match="ended without a result: ValueError"):
        check_isolation(Limits())
    monkeypatch.undo()
    check_isolation(Limits())


def test_memory_files_and_output_are_limited():
    assert run_python("x = bytearray(10**9)", limits=Limits(memory_mib=128)).error == "MemoryError"
    written = run_python("open('big', 'wb').write(b'x' * 10**7)", limits=Limits(file_mib=1))
    assert not written.ok
    noisy = run_python("print('a' * 50_000)", limits=Limits(max_output_chars=1000))
    assert len(noisy.stdout) < 1100
    assert "... more than 42001 bytes left out ..." in noisy.stdout
    assert run_python("print('ab')", limits=Limits(max_output_chars=1)).stdout == "\n... 3 characters left out ...\n"


def test_the_end_of_a_long_output_is_kept():
    printed = run_python("print('x' * 1_000_000); print('END')").stdout
    assert printed.startswith("xxx")
    assert printed.endswith("x\nEND\n")
    warning = "import sys\nprint('careful\\n' * 100_000, file=sys.stderr)\nraise ValueError('z')"
    assert run_python(warning).error == "ValueError: z"


def test_a_program_gets_none_of_our_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OFFBEAT_SECRET", "x")
    assert run_python("import os; print('OFFBEAT_SECRET' in os.environ, os.listdir())").stdout == "False []\n"


def test_more_than_one_process_is_a_setting():
    code = (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)"
    )
    assert run_python(code).error.startswith("PermissionError: [Errno 1] Operation not permitted")
    if "namespaces" in platform_isolation():
        assert run_python(code, limits=Limits(max_processes=4, memory_mib=1024)).stdout == "b'1\\n'\n"


def test_a_program_that_cannot_be_isolated_is_not_run(tmp_path: Path):
    made = tmp_path / "made"
    code = f"open({str(made)!r}, 'w')"
    with pytest.raises(IsolationError, match="files that are not theirs"):
        run_python(code, layers=("namespaces",))
    with pytest.raises(IsolationError, match="max_processes: 2 needs user namespaces"):
        run_python(code, layers=("landlock", "seccomp"), limits=Limits(max_processes=2))
    assert not made.exists()


def test_isolation_warn_runs_behind_audit_hooks_and_warns_once(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    limits = Limits(isolation="warn")
    code = f"import os\nopen({str(tmp_path / 'made')!r}, 'w')\nos.system('true')"
    for _ in range(2):
        outcome = run_python(code, layers=(), limits=limits)
        assert outcome.error == "PermissionError: os.system is not allowed here"
    assert (tmp_path / "made").exists()
    ours = [record.message for record in caplog.records if record.name == "offbeat.envs.sandbox.run"]
    assert [message.count("the network") for message in ours] == [1]


def test_missing_guarantees_are_described():
    check_isolation(Limits(), ("namespaces", "mounts"))
    check_isolation(Limits(), ("landlock", "seccomp"))
    with pytest.raises(IsolationError, match=r"the network.*other processes.*Landlock.*`isolation: warn`"):
        check_isolation(Limits(), ())
    with pytest.raises(IsolationError, match="max_processes: 2 needs user namespaces"):
        check_isolation(Limits(max_processes=2), ("landlock", "seccomp"))
    assert describe_missing(("landlock", "seccomp")) == [
        "filling the disk with many files (mounts in a user namespace)"
    ]
    assert describe_missing(("namespaces", "mounts")) == []
