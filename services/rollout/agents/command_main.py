"""Process that runs the command of an external agent."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.child_main import serve

MAX_ERROR_CHARS = 2_000
MAX_OUTPUT_BYTES, READ_BYTES = 1 << 20, 1 << 16
"""Retained output and size of a read, bytes; the result must be within the former."""


def run(command: Sequence[str], plain: Mapping[str, Any]) -> Any:
    """Run a command with the task in its environment and on stdin; return its last stdout line, as JSON if valid.

    Raises:
        RuntimeError: nonzero exit status.
    """
    task = AgentTask.of(plain)
    environment = {**os.environ, **task.environment()}
    pipe = subprocess.PIPE
    with (
        ThreadPoolExecutor(2) as readers,
        subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process,
    ):
        assert process.stdin
        assert process.stdout
        assert process.stderr
        stdout, stderr = readers.submit(_read_tail, process.stdout), readers.submit(_read_tail, process.stderr)
        with suppress(BrokenPipeError):  # the command may not read its stdin
            process.stdin.write(json.dumps(task.plain()).encode())
            process.stdin.close()
        output, errors = stdout.result(), stderr.result()
    sys.stderr.write(errors)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {errors.strip()[-MAX_ERROR_CHARS:]}")
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return lines[-1]


def _read_tail(stream: IO[bytes]) -> str:
    tail = bytearray()
    while chunk := os.read(stream.fileno(), READ_BYTES):
        tail += chunk
        if len(tail) > 2 * MAX_OUTPUT_BYTES:
            del tail[:-MAX_OUTPUT_BYTES]
    return tail[-MAX_OUTPUT_BYTES:].decode(errors="replace")


if __name__ == "__main__":
    serve({"run": run})
