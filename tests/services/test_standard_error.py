"""What a child process printed before it died, in a process whose standard error is a file."""

import subprocess
import sys
from pathlib import Path

PARENT = """
import multiprocessing, sys
from offbeat.services.standard_error import StandardError

def fail():
    print("(EngineCore pid=7) ValueError: a line that a log wrote before", file=sys.stderr, flush=True)
    try:
        import no_such_kernels
    except ImportError as error:
        print("(Worker pid=8) ModuleNotFoundError: " + str(error), file=sys.stderr, flush=True)
        raise RuntimeError("WorkerProc failed. See stack trace for root cause.") from None

if __name__ == "__main__":
    print("OSError: of an engine before", file=sys.stderr, flush=True)
    printed = StandardError()
    assert printed.last_error() is None
    child = multiprocessing.get_context("fork").Process(target=fail)
    child.start()
    child.join()
    print(printed.last_error())
"""


def test_the_last_error_with_a_cause_is_read_back(tmp_path: Path) -> None:
    with open(tmp_path / "err", "wb") as errors:
        done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=errors, check=True)
    assert done.stdout.decode().strip() == "(Worker pid=8) ModuleNotFoundError: No module named 'no_such_kernels'"


def test_a_pipe_is_not_read() -> None:
    script = "from offbeat.services.standard_error import StandardError as S; print(S().last_error())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"None"
