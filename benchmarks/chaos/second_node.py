"""Second node in the run's Ray cluster, whose raylet can be killed, and which may be a host of its own."""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from offbeat.benchmarks.chaos.faults import RAYLET, processes_of
from offbeat.benchmarks.chaos.second_host import SecondHost
from offbeat.services.process import terminate

NUM_CPUS = 2
OBJECT_STORE_BYTES = 80_000_000
SPREAD = {"RAY_scheduler_spread_threshold": "0.0"}
"""Prefer the emptier node."""
END_S = 5.0
GCS = "--gcs-address="
JOINED = b"Ray runtime started"


def cluster_environment() -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), **SPREAD}


class SecondNode:
    def __init__(self, log: Path, environment: Mapping[str, str], host: SecondHost | None = None) -> None:
        """host: closed with the node; None for this process's own network."""
        self.host = host
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.processes: set[psutil.Process] = set()
        """All processes; children of a killed raylet lose their parent."""

    @property
    def root(self) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid) if self._process is not None else None
        return None

    @property
    def has_joined(self) -> bool:
        """True once the running node has joined the cluster, which takes several starts on a busy machine."""
        if self._process is None or self._process.poll() is not None:
            return False
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return JOINED in log.read()

    def ensure_running(self, command: psutil.Process, redis_url: str) -> None:
        """Start a missing node once the command's Ray is up and, on a host of its own, the run's Redis is known."""
        if self._process is not None and self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self.processes.update(psutil.Process(self._process.pid).children(recursive=True))
            return
        address = _address(command)
        if address is None:
            return
        if self.host is not None and self.host.is_there:
            if not redis_url:
                return
            self.host.reach_redis(redis_url)
        options = (f"--address={address}", f"--num-cpus={NUM_CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}")
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *options]
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                ray if self.host is None else self.host.command(ray),
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            terminate(self._process, END_S)
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # psutil knows a process that has got the number of another
        if self.host is not None:
            self.host.close()


def _address(command: psutil.Process) -> str | None:
    for raylet in processes_of([command], RAYLET):
        with suppress(psutil.NoSuchProcess):
            for argument in raylet.cmdline():
                if argument.startswith(GCS):
                    return argument.removeprefix(GCS)
    return None
