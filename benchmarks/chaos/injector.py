"""Injection of faults; temporary ones are always reverted."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import psutil

from offbeat.benchmarks.chaos.disk import SmallDisk
from offbeat.benchmarks.chaos.failover import Wait, fail_over
from offbeat.benchmarks.chaos.faults import (
    PROCESSES,
    RAYLET,
    Fault,
    FaultKind,
    MissedError,
    processes_of,
    strike,
)
from offbeat.benchmarks.chaos.proxy import DELAYED
from offbeat.benchmarks.chaos.run_monitor import RunUnderChaos
from offbeat.benchmarks.chaos.second_node import SecondNode

DELAY_S = (0.02, 0.2)
"""Delay per chunk and direction."""
CONNECTION_FAULT_S = (2.0, 8.0)
WRITES_REFUSED_S = (4.0, 40.0)
"""Exceeds a call's timeout."""
ORDER_TIMEOUT_S = 20.0
DISK_FULL_S = (1.0, 4.0)
"""After the learner noticed."""
MAX_LOST_BYTES = 256 << 10
"""Of the append-only file."""
APPEND_ONLY_FILE = "appendonly.aof"
NODE_LOSS_S = (40.0, 60.0)
"""Partition after which Ray no longer knows the node."""
LAG_S = (1.0, 8.0)
"""Of a promoted replica."""
FAILURE_TIMEOUT_S = 60.0
LEARNER, REDIS_SERVER = PROCESSES["learner"], PROCESSES["redis-server"]


class FaultInjector:
    def __init__(
        self,
        run: RunUnderChaos,
        node: SecondNode,
        disk: SmallDisk,
        orders: Path,
        rng: random.Random,
        *,
        pause: Callable[[float], None],
        wait: Wait,
    ) -> None:
        self._run = run
        self._node = node
        self._disk = disk
        self._orders = orders
        self._rng = rng
        self._pause = pause
        self._wait = wait

    def victims(self, fault: Fault) -> list[psutil.Process]:
        if fault.target == RAYLET:
            if fault.act is FaultKind.PARTITION and not self._node.has_joined:
                return []
            return processes_of([self._node.root] if self._node.root else [], RAYLET)
        candidates = processes_of([psutil.Process()], fault.target)
        if fault.during or (
            fault.act is FaultKind.HANG and fault.target == LEARNER
        ):  # of learners, the one that trains
            leader = self._run.leader()
            return [process for process in candidates if leader in (process.pid, process.ppid())]
        return candidates

    def strike(self, fault: Fault) -> float:
        """Inject a fault; return its seconds. Raises MissedError."""
        match fault.act:
            case FaultKind.KILL | FaultKind.STOP | FaultKind.HANG:
                return self._process(fault)
            case FaultKind.MISBEHAVE:
                return self._misbehave(fault.target)
            case FaultKind.CONNECTIONS:
                return self._connections(fault.target)
            case FaultKind.MEMORY:
                return self._refuse_writes()
            case FaultKind.DISK:
                return self._fill_disk()
            case FaultKind.LOSS:
                return self._lose_writes(fault.target)
            case FaultKind.PARTITION:
                return self._partition(fault)

    def _process(self, fault: Fault) -> float:
        victims = self.victims(fault)
        if not victims:
            raise MissedError("there was no such process at that moment")
        try:
            return strike(fault, self._rng.choice(victims), self._rng, self._pause)
        except psutil.NoSuchProcess as error:
            raise MissedError(f"it had ended: {error}") from error

    def _misbehave(self, misbehavior: str) -> float:
        order = self._orders / misbehavior
        order.touch()
        if not self._wait(lambda: not order.exists(), ORDER_TIMEOUT_S):
            order.unlink(missing_ok=True)
            raise MissedError("no env was stepped")
        return 0.0

    def _connections(self, condition: str) -> float:
        duration_s = self._rng.uniform(*CONNECTION_FAULT_S)
        if condition != DELAYED:
            self._order(condition, duration_s)
            self._pause(duration_s)
            return duration_s
        self._order(condition, self._rng.uniform(*DELAY_S))
        try:
            self._pause(duration_s)
        finally:
            (self._orders / f"redis-{condition}").unlink(missing_ok=True)
        return duration_s

    def _order(self, condition: str, seconds: float) -> None:
        unfinished = self._orders / f".{condition}"
        unfinished.write_text(str(seconds))
        unfinished.rename(self._orders / f"redis-{condition}")

    def _refuse_writes(self) -> float:
        duration_s = self._rng.uniform(*WRITES_REFUSED_S)
        try:
            if not self._run.limit_memory(1):  # it may have heard of it all the same
                raise MissedError("Redis did not answer at that moment")
            self._pause(duration_s)
        finally:
            self._wait(lambda: self._run.limit_memory(0), FAILURE_TIMEOUT_S)
        return duration_s

    def _lose_writes(self, how: str) -> float:
        if how == "emptied":
            return self._empty_redis()
        servers = [each for each in processes_of([psutil.Process()], REDIS_SERVER) if each.name() == REDIS_SERVER]
        if not servers:
            raise MissedError("there was no redis-server at that moment")
        return self._fail_over(servers[0]) if how == "failover" else self._cut_redis(servers[0])

    def _cut_redis(self, server: psutil.Process) -> float:
        """Cut the append-only file, and kill the server."""
        self._run.expect_older_version()
        server.suspend()
        try:
            file = self._run.output_dir / "redis" / APPEND_ONLY_FILE
            size = file.stat().st_size
            os.truncate(file, size - self._rng.randint(1, min(MAX_LOST_BYTES, size // 2)))
        finally:
            server.kill()
        return 0.0

    def _fail_over(self, server: psutil.Process) -> float:
        url, lag_s = self._run.redis_url(), self._rng.uniform(*LAG_S)
        fail_over(
            url,
            server,
            self._orders,
            lag=lambda: self._pause(lag_s),
            promoted=self._run.expect_older_version,
            wait=self._wait,
        )
        return lag_s

    def _empty_redis(self) -> float:
        self._run.expect_older_version()
        if not self._run.empty_redis():
            raise MissedError("Redis did not answer at that moment")
        return 0.0

    def _partition(self, fault: Fault) -> float:
        host = self._node.host
        if host is None or not host.is_there:
            raise MissedError("the second node shares this one's network" if host is None else host.refusal)
        if not self.victims(fault):
            raise MissedError("there was no second node at that moment")
        duration_s = self._rng.uniform(*(NODE_LOSS_S if fault.comes_back else CONNECTION_FAULT_S))
        host.partition()
        try:
            self._pause(duration_s)
        finally:
            host.heal()
        return duration_s

    def _fill_disk(self) -> float:
        if not self._disk.is_there:
            raise MissedError(self._disk.refusal)
        full_s = self._rng.uniform(*DISK_FULL_S)
        self._disk.fill()
        try:
            noticed = self._wait(lambda: bool(self._run.trouble()), FAILURE_TIMEOUT_S)
            self._pause(full_s)
        finally:
            self._disk.free()
        if not noticed:
            raise MissedError(f"no checkpoint began or failed within {FAILURE_TIMEOUT_S:.0f} s")
        return full_s
