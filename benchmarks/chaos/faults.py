"""What can happen to a run: which process of it, by what its command line says, and what is done to it.

Invariant: only descendants of the run's own command (and of the second node's) are ever signalled, each by its pid.
"""

import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import psutil

STOP_S = (2.0, 8.0)
"""How long a stopped process stays so."""
SHARED_TRACKER = "resource_tracker"


class FaultKind(StrEnum):
    """What is done."""

    KILL = "killed"
    """SIGKILL."""
    STOP = "stopped"
    """SIGSTOP for a while, then SIGCONT."""
    HANG = "hangs"
    """SIGSTOP for good: somebody must miss it and replace it."""
    MISBEHAVE = "env"
    """An env is told to; see `offbeat.benchmarks.chaos.faulty_env`."""
    CONNECTIONS = "connections"
    """Something is done to the connections to Redis; see `offbeat.benchmarks.chaos.proxy`."""
    MEMORY = "memory"
    """Redis has none left for writes, for a while."""
    DISK = "disk"
    """The disk of the checkpoints is filled up, for a while."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    act: FaultKind = FaultKind.KILL
    what: str = ""
    """KILL and STOP: what the command line of the process holds; else what exactly is done."""
    comes_back: bool = False
    """Whether another process of its kind must be started."""
    during: str = ""
    """Stage of the learner (`learner_doing`) in which it strikes; empty: at any moment."""

    @property
    def has_victim(self) -> bool:
        """Whether it strikes a process."""
        return self.act in (FaultKind.KILL, FaultKind.STOP, FaultKind.HANG)


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
"""Kind -> what the command line of its processes holds."""
SPARE = ("single env",)
"""Kinds of which another is started only where one is short."""
HUNG = ("env worker", "single env", "engine core", "learner", "redis-server")
"""Kinds that are replaced when they hang for good."""
FAULTS = (
    *(Fault(f"{kind} killed", FaultKind.KILL, mark, kind not in SPARE) for kind, mark in PROCESSES.items()),
    *(Fault(f"{kind} stopped", FaultKind.STOP, mark) for kind, mark in PROCESSES.items()),
    *(Fault(f"{kind} hangs", FaultKind.HANG, PROCESSES[kind], kind not in SPARE) for kind in HUNG),
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
)


def plan(kills: int, seed: int) -> list[Fault]:
    """Which faults, in which order: every kind comes as often as any other, give or take one."""
    rng = random.Random(seed)
    order: list[Fault] = []
    while len(order) < kills:
        order += rng.sample(FAULTS, len(FAULTS))
    return order[:kills]


def processes_of(roots: Iterable[psutil.Process], mark: str) -> list[psutil.Process]:
    """Living descendants of commands whose command line holds `mark`, oldest first."""
    found: list[tuple[float, psutil.Process]] = []
    for root in roots:
        try:
            family = root.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                line = " ".join(process.cmdline())
                if mark in line and SHARED_TRACKER not in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.create_time(), process))
            except psutil.NoSuchProcess:
                continue
    return [process for _, process in sorted(found, key=lambda row: row[0])]


def strike(
    fault: Fault, victim: psutil.Process, rng: random.Random, sleep: Callable[[float], None] = time.sleep
) -> float:
    """Kill or stop a process; returns for how long it was stopped, s."""
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
    """Their ids."""
    return {process.pid for process in processes}
