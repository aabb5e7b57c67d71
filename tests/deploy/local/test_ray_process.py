"""A start of Ray that timed out is cleaned up and retried."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from offbeat.deploy.local.ray_head import ENVIRONMENT
from offbeat.deploy.local.ray_process import (
    MAX_STARTS,
    TIMEOUT_MESSAGE,
    start_with_retries,
)

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
RAY_ERROR = f"The current node {TIMEOUT_MESSAGE}. This could happen because some of the raylet failed to startup"


def test_a_start_that_timed_out_is_cleaned_up_and_retried():
    """Runs in a separate process: the clean-up ends all its children."""
    code = f"""
        import subprocess, psutil
        from offbeat.deploy.local.head_watch import HeadWatch
        from offbeat.deploy.local.ray_process import _clean_up, start_with_retries
        children, retries = [], []
        def on_retry():
            retries.append(1)
            _clean_up(HeadWatch(print))
        def start():
            assert all(child.poll() is not None for child in children), "processes of the last start are still alive"
            child = subprocess.Popen({SLEEPS!r}, stdout=subprocess.PIPE)
            child.stdout.readline()
            children.append(child)
            if len(children) < 3:
                raise Exception({RAY_ERROR!r})
        start_with_retries(start, on_retry)
        assert children[-1].poll() is None
        print(len(children), len(retries))
        children[-1].kill()
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "3 2", done.stderr
    assert done.stderr.count(TIMEOUT_MESSAGE) == 2


def test_serve_and_the_control_service_are_imported_without_pandas():
    code = """
import sys
from offbeat.deploy.local.ray_process import main
main()
from ray import serve
import offbeat.services.control.app
assert sys.modules["pandas"] is None
assert "pyarrow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=True, timeout=120)


def test_workers_of_uv_run_have_the_environment_of_the_command(tmp_path: Path):
    """Ray looks for `uv run` among the parents, and would start its workers by it, in a copy of the current folder."""
    code = "from ray._private.worker import _maybe_modify_runtime_env as modify; print(modify(None, False))"
    (tmp_path / "run").write_text(f"{sys.executable} -c '{code}'\ntrue\n")
    done = subprocess.run(
        ["uv", "run"],
        executable="/bin/sh",
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == "None\n", done.stderr


def test_the_number_of_starts_is_bounded():
    retries: list[int] = []

    def start() -> None:
        raise RuntimeError(RAY_ERROR)

    with pytest.raises(RuntimeError, match=TIMEOUT_MESSAGE):
        start_with_retries(start, lambda: retries.append(1))
    assert len(retries) == MAX_STARTS - 1


def test_another_error_is_not_retried():
    before = {child.pid for child in psutil.Process().children()}

    def start() -> None:
        raise ValueError("no such option")

    with pytest.raises(ValueError, match="option"):
        start_with_retries(start, lambda: pytest.fail("it was retried"))
    assert {child.pid for child in psutil.Process().children()} == before
