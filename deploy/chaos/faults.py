"""What can happen to a run: which process of it, by what its command line says, and what is done to it.

Invariant: only descendants of the run's own command are ever signalled, each by its pid.
"""

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

STOP_S = (2.0, 8.0)
"""How long a stopped process stays so."""
SHARED_TRACKER = "resource_tracker"


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    mark: str = ""
    """What the command line of its process holds; empty: it is done to Redis' connections."""
    stops: bool = False
    """SIGSTOP for a while, then SIGCONT; else SIGKILL."""
    comes_back: bool = True
    """Whether another process of its kind must be started; an env's is only when one is short."""
    during: str = ""
    """Stage of the learner (`learner_doing`) in which it strikes; empty: at any moment."""


ENV_PROCESS = "services.rollout.child"
FAULTS = (
    Fault("env worker killed", "ray::EnvWorker"),
    Fault("single env killed", ENV_PROCESS, comes_back=False),
    Fault("engine core killed", "VLLM::EngineCore"),
    Fault("generation replica killed", "ray::ServeReplica:generation"),
    Fault("weight broker killed", "ray::ServeReplica:weights"),
    Fault("control replica killed", "ray::ServeReplica:control"),
    Fault("Serve controller killed", "ray::ServeController"),
    Fault("Serve proxy killed", "ray::ProxyActor"),
    Fault("learner killed", "trainer.cli"),
    Fault("learner killed in a checkpoint", "trainer.cli", during="checkpoint"),
    Fault("learner killed in a publish", "trainer.cli", during="publish"),
    Fault("redis-server killed", "redis-server"),
    Fault("Redis connections cut", ""),
    Fault("env worker stopped", "ray::EnvWorker", stops=True),
    Fault("engine core stopped", "VLLM::EngineCore", stops=True),
    Fault("learner stopped", "trainer.cli", stops=True),
    Fault("redis-server stopped", "redis-server", stops=True),
)


def plan(kills: int, seed: int) -> list[Fault]:
    """Which faults, in which order: every kind comes as often as any other, give or take one."""
    rng = random.Random(seed)
    order: list[Fault] = []
    while len(order) < kills:
        order += rng.sample(FAULTS, len(FAULTS))
    return order[:kills]


def processes_of(root: psutil.Process, mark: str) -> list[psutil.Process]:
    """Living descendants of a command whose command line holds `mark`, oldest first."""
    found: list[tuple[float, psutil.Process]] = []
    try:
        family = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
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
    if not fault.stops:
        victim.kill()
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
