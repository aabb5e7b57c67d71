import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat import Run, RunElsewhereError
from offbeat.deploy.api.testing import append_records, step_record
from offbeat.deploy.run_folder import LOCK, LockHolder, locked, write_config


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_config(tmp_path, "exp_name: lake\n")
    return Run.open(tmp_path)


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    """Process that is no run."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_an_ended_run_signals_no_process_that_has_its_pid(run: Run, stranger: "subprocess.Popen[bytes]"):
    """As the run of another container, whose pids are low."""
    (run.folder / LOCK).write_bytes(LockHolder(stranger.pid, LockHolder.own().place, "").encode())
    assert run.state == "stopped"
    run.stop(timeout_s=1)
    assert stranger.poll() is None


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (6, "finished"), (130, "stopped"), (1, "failed")])
def test_the_exit_code_names_the_end(code: int, state: str, tmp_path: Path):
    """6: finished without having trained anything, as REST and `Run.open` say, too."""
    with subprocess.Popen(["sh", "-c", f"exit {code}"]) as process:
        process.wait()
    assert Run(tmp_path, process=process).state == state


def test_a_run_of_another_host_runs_and_gets_no_signal(run: Run, stranger: "subprocess.Popen[bytes]"):
    with locked(run.folder):
        (run.folder / LOCK).write_bytes(LockHolder(stranger.pid, "boot/pid:[1]", "node-3").encode())
        assert run.state == "running"
        with pytest.raises(RunElsewhereError, match=f"is used by process {stranger.pid} of node-3, on another host"):
            run.stop(timeout_s=1)
    assert stranger.poll() is None
    assert run.state == "stopped"


def test_a_run_over_rest_without_records_of_a_command_takes_time(run: Run):
    append_records(run.folder, *(replace(step_record(step, reward=0.5), time=100.0 * step) for step in (1, 2, 3)))
    history = run._history()
    assert [history.seconds(step.time) for step in history.steps.newest()] == [0.0, 100.0, 200.0]


def test_a_run_is_stopped_when_its_last_thread_has_ended(run: Run):
    """A process whose main thread has ended is a zombie, yet can not be reaped."""
    says = """
import ctypes, signal, sys, threading, time
from pathlib import Path
from offbeat.deploy.run_folder import locked
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
try:
    with locked(Path(sys.argv[1])):
        print("locked", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    threading.Thread(target=time.sleep, args=(1,)).start()
    ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-c", says, str(run.folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        run.stop(timeout_s=30)
        assert process.poll() is not None
