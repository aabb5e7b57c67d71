"""A second node on this machine that joins the run's Ray, so that a raylet can die without Ray as a whole.

Invariant: a node that ended is replaced; with `close`, all of it is gone.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from offbeat.benchmarks.chaos.faults import RAYLET, processes_of
from offbeat.services.process import terminate

NUM_CPUS = 2
OBJECT_STORE_BYTES = 80_000_000
SPREAD = {"RAY_scheduler_spread_threshold": "0.0"}
"""Actors go to the emptier node, not to the head as long as there is room."""
END_S = 5.0
GCS = "--gcs-address="


def cluster_environment() -> dict[str, str]:
    """Of the run's command and of the node: what both must have alike."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), **SPREAD}


class SecondNode:
    """`ray start` of a node, as an operator would."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """environment: see `cluster_environment`."""
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.seen: set[psutil.Process] = set()
        """Every process of the node that was ever seen: those of a raylet that was killed lose their parent."""

    @property
    def root(self) -> psutil.Process | None:
        """Whose descendants the node's processes are; None while there is no node."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid) if self._process is not None else None
        return None

    def keep_up(self, command: psutil.Process) -> None:
        """Start the node where there is none, once the run of `command` has a Ray that it can join."""
        if self._process is not None and self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self.seen.update(psutil.Process(self._process.pid).children(recursive=True))
            return
        address = _address(command)
        if address is None:
            return
        options = (f"--address={address}", f"--num-cpus={NUM_CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}")
        ray = Path(sys.executable).with_name("ray")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [ray, "start", "--block", "--disable-usage-stats", *options],
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def close(self) -> None:
        """End it with all that it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            terminate(self._process, END_S)
        for process in self.seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # psutil knows a process that has got the number of another


def _address(command: psutil.Process) -> str | None:
    """Where the GCS listens of the Ray that a command has started, as its raylet was told."""
    for raylet in processes_of([command], RAYLET):
        with suppress(psutil.NoSuchProcess):
            for argument in raylet.cmdline():
                if argument.startswith(GCS):
                    return argument.removeprefix(GCS)
    return None
