import subprocess
import sys

import pytest

from offbeat.deploy.cluster.offbeat_process import last_output, read_json
from offbeat.services.errors import ControlError


def run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_last_output_of_a_process_that_raised_is_its_error() -> None:
    process = run("raise KeyError('weights')")
    assert process.returncode == 1  # as after a reproduction that differs
    with pytest.raises(ControlError, match=r"(?s)^Traceback .*KeyError: 'weights'$"):
        read_json(process)


def test_a_process_without_output_is_named_by_its_exit_code() -> None:
    assert last_output(run("raise SystemExit(3)")) == "the process ended with exit code 3 and no output"


def test_the_output_is_read_whatever_the_exit_code() -> None:
    assert read_json(run("import sys; print('{\"compared\": []}'); sys.exit(1)")) == {"compared": []}
