"""Python programs of a learner, which start at once: forks of one process that has imported their libraries."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, Any

from tests.paths import ROOT


class ForkServer:
    """The process that forks, which ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        atexit.register(self.close)

    def fork(self, request: Mapping[str, object], outputs: Sequence[int]) -> int:
        """Return the pid of a fork that runs a program."""
        return self._answer(request, outputs)

    def exit_code(self, pid: int) -> int | None:
        return self._answer({"pid": pid})

    def _answer(self, request: Mapping[str, object], outputs: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], outputs)
            return json.loads(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


server = cache(ForkServer)


class ForkedProcess:
    """A program with the methods of `subprocess.Popen`.

    arguments: of `python`: a script, `-m MODULE` or `-c CODE`, and its own.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        env: Mapping[str, str] = os.environ,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        start_new_session: bool = False,
    ) -> None:
        request = {
            "arguments": [str(each) for each in arguments],
            "environment": dict(env),
            "folder": os.getcwd(),
            "new_session": start_new_session,
        }
        outputs = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        self.pid = server().fork(request, outputs)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = server().exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs after `timeout` seconds.
        """
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
