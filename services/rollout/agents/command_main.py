"""Process that runs the command of an external agent."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import IO, Any

from offbeat.services.rollout.agents.environment import command_environment
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.child_main import serve

MAX_ERROR_CHARS = 2_000
MAX_OUTPUT_BYTES, READ_BYTES = 1 << 20, 1 << 16
"""Retained output and size of a read, bytes; the result must be within the former."""
STDERR = 2
LAST_OUTPUT_S = 1.0
"""Time to read a stream of an ended command, which children that it left may hold open."""


def run(command: Sequence[str], plain: Mapping[str, Any]) -> Any:
    """Run a command with the task in its environment and on stdin; return its last stdout line, as JSON if valid.

    Raises:
        RuntimeError: nonzero exit status.
    """
    task = AgentTask.of(plain)
    environment = {**command_environment(), **task.environment()}
    pipe = subprocess.PIPE
    process = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    stdout, stderr = _Tail(process.stdout), _Tail(process.stderr, is_logged=True)
    Thread(target=_write, args=(process.stdin, json.dumps(task.plain()).encode()), daemon=True).start()
    process.wait()
    output, errors = stdout.text(), stderr.text()
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {errors.strip()[-MAX_ERROR_CHARS:]}")
    # `splitlines` would cut JSON at U+2028
    lines = [line for line in output.replace("\r", "\n").split("\n") if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError):
        return lines[-1]


def _write(stream: IO[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError), stream:  # the command may not read its stdin
        stream.write(content)


class _Tail(Thread):
    """Reader of a stream's end; closes the stream. is_logged: copy to stderr."""

    def __init__(self, stream: IO[bytes], *, is_logged: bool = False) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._is_logged = is_logged
        self._tail = bytearray()
        self.start()

    def run(self) -> None:
        with self._stream:
            while chunk := os.read(self._stream.fileno(), READ_BYTES):
                self._tail += chunk
                if self._is_logged:
                    os.write(STDERR, chunk)
                if len(self._tail) > 2 * MAX_OUTPUT_BYTES:
                    del self._tail[:-MAX_OUTPUT_BYTES]

    def text(self) -> str:
        """Return what was read, by LAST_OUTPUT_S at the latest."""
        self.join(LAST_OUTPUT_S)
        return self._tail[-MAX_OUTPUT_BYTES:].decode(errors="replace")


if __name__ == "__main__":
    serve({"run": run})
