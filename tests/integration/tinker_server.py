"""`offbeat tinker` as a process, for tests with the real SDK."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.paths import ROOT
from tests.waiting import wait_until_sync

LEARNER, HTTP, REDIS = "offbeat.trainer.tinker.process", "offbeat.deploy.tinker.http_process", "redis-server"


class RunningServer:
    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.folder = folder
        self.output: list[str] = []
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Address, once it is printed."""
        wait_until_sync(lambda: self._process.poll() is not None or any("http://" in line for line in self.output))
        found = re.search(r"http://[0-9.:]+", "".join(self.output))
        assert found, self.output
        return found.group()

    def pid_of(self, part: str) -> int:
        """Return the process that runs a part of the server."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        found = [each.pid for each in children if any(part in argument for argument in each.cmdline())]
        assert len(found) == 1, (part, found)
        return found[0]

    def kill(self, part: str) -> None:
        psutil.Process(self.pid_of(part)).send_signal(signal.SIGKILL)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(60)
        self._reader.join()
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            self.output += iter(stdout.readline, "")


@contextmanager
def running_server(folder: Path, *overrides: str) -> Iterator[RunningServer]:
    """Serve the quickstart's policy."""
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "tinker", "deploy/configs/quickstart.yaml"]
    process = subprocess.Popen(
        [*command, f"output_dir={folder}", "tinker.port=0", *overrides],
        cwd=ROOT,
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
