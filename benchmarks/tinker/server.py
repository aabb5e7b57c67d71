"""`offbeat tinker` as a process whose parts can be killed and measured."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from offbeat.services.process import bind_to_thread, terminate

LEARNER, HTTP, REDIS = "offbeat.trainer.tinker.process", "offbeat.deploy.tinker.http_process", "redis-server"
ENGINE = "VLLM::EngineCore"
"""With `tinker.engine=vllm`."""
STOP_TIMEOUT_S = 240.0


class RunningServer:
    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.folder = folder
        """`output_dir`."""
        self.output: list[str] = []
        self._process = process
        self._has_address = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Address, once it is printed; raises RuntimeError if the server ends before."""
        self._has_address.wait()
        if (match := re.search(r"http://[0-9.:]+", "".join(self.output))) is None:
            raise RuntimeError(f"offbeat tinker has ended: {''.join(self.output)}")
        return match.group()

    def pid_of(self, part: str) -> int:
        """Return the process that runs a part of the server; raises ProcessLookupError while there is none."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        matching = [each.pid for each in children if any(part in argument for argument in _command(each))]
        if len(matching) != 1:
            raise ProcessLookupError(f"{len(matching)} processes run {part}")
        return matching[0]

    def kill(self, part: str) -> None:
        os.kill(self.pid_of(part), signal.SIGKILL)

    def reset_peaks(self) -> None:
        for part in (LEARNER, HTTP):
            Path(f"/proc/{self.pid_of(part)}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the learner's and the HTTP server's peak memory since `reset_peaks`."""
        status = [Path(f"/proc/{self.pid_of(part)}/status").read_text() for part in (LEARNER, HTTP)]
        return sum(int(each.split("VmHWM:")[1].split()[0]) for each in status) / 1024

    def stop(self) -> int:
        """Return the exit status."""
        terminate(self._process, STOP_TIMEOUT_S)
        self._reader.join()
        return self._process.returncode

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self.output.append(line)
                if "http://" in line:
                    self._has_address.set()
        self._has_address.set()


@contextmanager
def running_server(folder: Path, *overrides: str) -> Iterator[RunningServer]:
    """Serve the quickstart's policy."""
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "tinker", "quickstart"]
    process = subprocess.Popen(
        bind_to_thread([*command, f"output_dir={folder}", "tinker.port=0", *overrides], by=signal.SIGTERM),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = RunningServer(process, folder)
    try:
        yield server
    finally:
        if process.poll() is None:
            server.stop()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
