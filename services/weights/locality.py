"""Shared-memory locality of a process, for `weights.transport: shm`.

Invariant: `memory` is equal exactly for processes that share a mount of /dev/shm.
"""

import os
import socket
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from redis import Redis

from offbeat.services.errors import WeightsError
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.replica_reports import read_reports

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")
MAX_REPORT_AGE_S = 15.0
"""Of reports that locate generation."""


@dataclass(frozen=True, slots=True)
class Locality:
    host: str
    memory: str
    """Id; empty without shared memory."""


@lru_cache(maxsize=1)
def this_locality() -> Locality:
    try:
        boot, device = BOOT_ID.read_text().strip(), os.stat(SHARED_MEMORY).st_dev
    except OSError:
        return Locality(socket.gethostname(), "")
    return Locality(socket.gethostname(), f"{boot}:{device}")


def check_reach(redis: Redis, run_id: str, config: WeightsConfig, here: Locality | None = None) -> None:
    """Check that every replica can read weights published here.

    Raises:
        WeightsError: the transport is shared memory, and a replica uses another one.
    """
    if config.transport != "shm":
        return
    here = here or this_locality()
    for replica, report in read_reports(redis, run_id).items():
        if report.memory and report.memory != here.memory and report.at > time.time() - MAX_REPORT_AGE_S:
            raise WeightsError(
                f"weights.transport=shm reaches one host, and replica {replica} samples on {report.host}, this "
                f"learner runs on {here.host}: attach it there, or start the run with weights.transport=fs and a "
                "weights.url that both hosts reach"
            )
