"""Faults of a run and their victims.

Invariant: only descendants of the run's command and the second node are signalled, by pid.
"""

import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import psutil

STOP_S = (2.0, 8.0)
SHARED_TRACKER = "resource_tracker"


class MissedError(Exception):
    """Fault that could not be injected."""


class FaultKind(StrEnum):
    KILL = "killed"
    STOP = "stopped"
    HANG = "hangs"
    """SIGSTOP without SIGCONT."""
    MISBEHAVE = "env"
    CONNECTIONS = "connections"
    MEMORY = "memory"
    """Refusal of writes by Redis."""
    DISK = "disk"
    """Full checkpoint disk."""
    LOSS = "loss"
    """Acknowledged writes that Redis forgets."""
    PARTITION = "partitioned"
    """Silence between the second node and everything else."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: FaultKind = FaultKind.KILL
    target: str = ""
    """With a victim: part of its command line; else a variant."""
    comes_back: bool = False
    """A replacement must start."""
    during: str = ""
    """Learner's stage; empty: any."""

    @property
    def has_victim(self) -> bool:
        return self.act in (FaultKind.KILL, FaultKind.STOP, FaultKind.HANG, FaultKind.PARTITION)


RAYLET = "raylet/raylet"
PROCESSES = {
    "env worker": "ray::EnvWorker",
    "single env": "offbeat.services.rollout.envs.process_env_main",
    "engine core": "VLLM::EngineCore",
    "generation replica": "ray::ServeReplica:generation",
    "weight broker": "ray::ServeReplica:weights",
    "control replica": "ray::ServeReplica:control",
    "Serve controller": "ray::ServeController",
    "Serve proxy": "ray::ProxyActor",
    "learner": "offbeat.trainer.cli",
    "redis-server": "redis-server",
    "raylet of the second node": RAYLET,
}
"""Kind -> part of its command line."""
REPLACED_IF_SHORT = ("single env",)
"""Replaced only if too few."""
REPLACED_IF_HUNG = ("env worker", "single env", "engine core", "learner", "redis-server")
FAULTS = (
    *(Fault(f"{kind} killed", FaultKind.KILL, mark, kind not in REPLACED_IF_SHORT) for kind, mark in PROCESSES.items()),
    *(Fault(f"{kind} stopped", FaultKind.STOP, mark) for kind, mark in PROCESSES.items()),
    *(
        Fault(f"{kind} hangs", FaultKind.HANG, PROCESSES[kind], kind not in REPLACED_IF_SHORT)
        for kind in REPLACED_IF_HUNG
    ),
    *(
        Fault(f"learner {act} in a {stage}", act, PROCESSES["learner"], act is FaultKind.KILL, during=stage)
        for act in (FaultKind.KILL, FaultKind.STOP)
        for stage in ("checkpoint", "publish")
    ),
    Fault("env hangs", FaultKind.MISBEHAVE, "hang"),
    Fault("env crashes", FaultKind.MISBEHAVE, "crash"),
    Fault("env prints without end", FaultKind.MISBEHAVE, "flood"),
    Fault("env takes all memory", FaultKind.MISBEHAVE, "hog"),
    Fault("Redis connections cut", FaultKind.CONNECTIONS, "cut"),
    Fault("Redis answers cut in the middle", FaultKind.CONNECTIONS, "torn"),
    Fault("Redis connections slow", FaultKind.CONNECTIONS, "delayed"),
    Fault("Redis connections silent", FaultKind.CONNECTIONS, "silent"),
    Fault("Redis refuses writes", FaultKind.MEMORY),
    Fault("checkpoint disk full", FaultKind.DISK),
    Fault("Redis loses its last writes", FaultKind.LOSS, "cut"),
    Fault("Redis emptied", FaultKind.LOSS, "emptied"),
    Fault("Redis fails over to a lagging replica", FaultKind.LOSS, "failover"),
    Fault("second node partitioned", FaultKind.PARTITION, RAYLET),
    Fault("second node partitioned until Ray gives it up", FaultKind.PARTITION, RAYLET, comes_back=True),
)


def plan(kills: int, seed: int, only: str = "") -> list[Fault]:
    """Return faults whose name contains `only`; counts of kinds differ by at most one.

    Raises:
        ValueError: there is no such fault.
    """
    faults = [fault for fault in FAULTS if only in fault.name]
    if not faults:
        raise ValueError(f"no fault is named like {only!r}: {', '.join(fault.name for fault in FAULTS)}")
    rng = random.Random(seed)
    order: list[Fault] = []
    while len(order) < kills:
        order += rng.sample(faults, len(faults))
    return order[:kills]


def processes_of(roots: Iterable[psutil.Process], mark: str) -> list[psutil.Process]:
    """Return descendants with `mark` in the command line, oldest first."""
    processes: list[tuple[float, psutil.Process]] = []
    for root in roots:
        try:
            family = root.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                line = " ".join(process.cmdline())
                if mark in line and SHARED_TRACKER not in line and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append((process.create_time(), process))
            except psutil.NoSuchProcess:
                continue
    return [process for _, process in sorted(processes, key=lambda row: row[0])]


def strike(
    fault: Fault, victim: psutil.Process, rng: random.Random, sleep: Callable[[float], None] = time.sleep
) -> float:
    """Kill or stop a process; return the stop's seconds."""
    if fault.act in (FaultKind.KILL, FaultKind.HANG):
        victim.send_signal(signal.SIGKILL if fault.act is FaultKind.KILL else signal.SIGSTOP)
        return 0.0
    duration_s = rng.uniform(*STOP_S)
    victim.send_signal(signal.SIGSTOP)
    try:
        sleep(duration_s)
    finally:
        if victim.is_running():
            victim.send_signal(signal.SIGCONT)
    return duration_s


def pids(processes: Sequence[psutil.Process]) -> set[int]:
    return {process.pid for process in processes}
