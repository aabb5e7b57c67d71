"""Program that answers JSON lines, in a process that can be killed.

Invariant: a request that the program does not survive has no answer, and the next one goes to a new process.
"""

import atexit
import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from typing import Any


class LineProcess:
    """A program's process, started by the first request; it first prints `true` if it works."""

    def __init__(self, command: Sequence[str], failure: str) -> None:
        """failure: message of the RuntimeError if the program can't start."""
        self._command, self._failure = command, failure
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def ask(self, request: Any) -> Any:
        """Return the reply, None if the program ended; raises RuntimeError if it can't start."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # killed while idle, not by a request
                self._stop()
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = ""
            except BaseException:  # its reply would be taken for the next request's
                self._stop()
                raise
            if reply:
                return json.loads(reply)
            self._stop()
            return None

    def close(self) -> None:
        """Kill the process; a request that it is busy with has no answer."""
        atexit.unregister(self.close)
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        if process.stdout.readline() == "true\n":
            return process
        _kill(process)
        raise RuntimeError(self._failure)


class LineProcesses:
    """Processes of one program: a request waits only while all of them are busy."""

    def __init__(self, command: Sequence[str], failure: str, num_processes: int) -> None:
        # the last used one is taken first, so that no more processes start than requests overlap
        self._idle: queue.LifoQueue[LineProcess] = queue.LifoQueue()
        self._processes = [LineProcess(command, failure) for _ in range(num_processes)]
        for process in self._processes:
            self._idle.put(process)

    def ask(self, request: Any) -> Any:
        """Return the reply, None if the program ended; raises RuntimeError if it can't start."""
        process = self._idle.get()
        try:
            return process.ask(request)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in self._processes:
            process.close()


def _kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # a request that was not read is still buffered
        pass
