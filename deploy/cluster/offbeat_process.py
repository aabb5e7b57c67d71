"""`offbeat` commands in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.services.errors import ControlError
from offbeat.services.process import bind_to_thread
from offbeat.trainer.cli import REDIS_VARIABLE

MAX_OUTPUT_CHARS = 2000


def run_offbeat(
    arguments: Sequence[str], *, working_dir: Path, redis_url: str, timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command that ends with this thread, with the Redis URL in its environment; raises `ControlError` on
    timeout.
    """
    try:
        return subprocess.run(
            bind_to_thread([sys.executable, "-m", "offbeat.deploy.cli.app", *arguments]),
            cwd=working_dir,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                REDIS_VARIABLE: redis_url,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ControlError(f"not ended in {timeout_s:g} s") from error


def last_output(process: "subprocess.CompletedProcess[str]") -> str:
    output = (process.stderr or process.stdout).strip()[-MAX_OUTPUT_CHARS:]
    return output or f"the process ended with exit code {process.returncode} and no output"


def read_json(process: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Parse the output; raises `ControlError` with the last of it if it is no JSON, as after a traceback."""
    try:
        return json.loads(process.stdout)
    except json.JSONDecodeError as error:
        raise ControlError(last_output(process)) from error
