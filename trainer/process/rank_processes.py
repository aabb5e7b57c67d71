"""Processes of a learner's ranks."""

import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import psutil

from offbeat.services.errors import MeshError
from offbeat.services.process import die_with_parent, free_port
from offbeat.trainer.process.heartbeat import HEARTBEAT_FD, Heartbeat

logger = logging.getLogger(__name__)

RANK_ZERO_PID = "OFFBEAT_RANK_ZERO_PID"
EXIT_DETECTION_TIMEOUT_S = 2.0
"""Delay of an exit after a broken connection."""
FOLLOWER_EXIT_TIMEOUT_S = 30.0
MAIN_THREAD_EXIT_TIMEOUT_S = 15.0
"""Time for the main thread to exit after a rank died."""
CHECK_INTERVAL_S = 1.0


class RankDiedError(MeshError):
    """Exit of a rank, which ends the learner."""


class OtherNodes(Protocol):
    address: str
    """Of rank 0."""
    num_local: int
    """On this node, with rank 0."""

    def open(self, port: int) -> None: ...

    def check(self) -> None:
        """Raise `RankDiedError` if one of them has died."""
        ...

    def close(self) -> None: ...


class FollowerRanks:
    """This node's other ranks, which exit with rank 0, even if killed."""

    def __init__(
        self,
        processes: Sequence["subprocess.Popen[bytes]"] = (),
        heartbeats: Sequence[Heartbeat] = (),
        *,
        first_rank: int = 1,
        world_size: int | None = None,
        others: OtherNodes | None = None,
    ) -> None:
        self._processes = processes
        self._heartbeats = heartbeats
        self._first_rank = first_rank
        self._world_size = world_size or len(processes) + 1
        self._others = others
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def check(self) -> None:
        if self._others is not None and not self._stopping:
            self._others.check()
        codes = [process.poll() or 0 for process in self._processes]  # 0: it runs, or was stopped
        code = min(codes, key=lambda each: each or math.inf, default=0)  # killed, before those that then lost a peer
        if code and not self._stopping:
            index = codes.index(code)
            rank, how = index + self._first_rank, f"exited with code {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            raise RankDiedError(
                f"rank {rank} (pid {self._processes[index].pid}) {how}: all {self._world_size} processes exit. "
                f"Its log is logs/learner-{rank}.log"
            )

    def kill_hung(self) -> None:
        pairs = zip(self._processes, self._heartbeats, strict=True)
        for rank, (process, heartbeat) in enumerate(pairs, start=self._first_rank):
            silent_s = heartbeat.silence_s()
            if silent_s and process.poll() is None:
                logger.error("rank %d (pid %d) sent no heartbeat for %.0f s: killed", rank, process.pid, silent_s)
                process.kill()

    def raise_if_rank_died(self) -> None:
        """Raise `RankDiedError` if a rank dies within `EXIT_DETECTION_TIMEOUT_S`."""
        deadline = time.monotonic() + EXIT_DETECTION_TIMEOUT_S
        while (self._processes or self._others) and time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)

    def wait(self) -> None:
        for process in self._processes:
            process.wait(timeout=FOLLOWER_EXIT_TIMEOUT_S)

    def kill(self) -> None:
        self._stopping = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def gloo_interface(address: str) -> dict[str, str]:
    """Return the environment in which gloo takes the network interface of `address`; by default it takes that of the host
    name, on Debian loopback.
    """
    addresses = psutil.net_if_addrs().items()
    names = [name for name, entries in addresses if address in {entry.address for entry in entries}]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


@contextmanager
def start_followers(
    num_processes: int, command: Sequence[str], timeout_s: float, others: OtherNodes | None = None
) -> Iterator[FollowerRanks]:
    """Start ranks 1 to `num_processes - 1`, unless a launcher (torchrun) did.

    timeout_s: silence after which a rank is killed. others: of other nodes, if any.
    """
    if num_processes == 1 or "WORLD_SIZE" in os.environ:
        yield FollowerRanks()
        return
    num_local, host = (others.num_local, others.address) if others is not None else (num_processes, "127.0.0.1")
    port = free_port()
    address = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes)}
    if others is not None:
        address = {**gloo_interface(host), **os.environ, **address}
    os.environ.update(address, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(num_local))
    heartbeats = [Heartbeat(timeout_s) for _ in range(1, num_local)]
    processes = [
        start_rank(command, rank, rank, heartbeat, os.environ) for rank, heartbeat in enumerate(heartbeats, start=1)
    ]
    if others is not None:
        others.open(port)
    followers = FollowerRanks(processes, heartbeats, world_size=num_processes, others=others)
    threading.Thread(target=_exit_if_rank_died, args=(followers,), name="follower-ranks", daemon=True).start()
    try:
        yield followers
        followers.wait()
    finally:
        followers.kill()
        if others is not None:
            others.close()


def start_rank(
    command: Sequence[str],
    rank: int,
    local_rank: int,
    heartbeat: Heartbeat,
    environment: Mapping[str, str],
    log: Path | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a rank that dies with the calling thread. log: None: this process's output."""
    fd = heartbeat.write_end
    own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), RANK_ZERO_PID: str(os.getpid()), HEARTBEAT_FD: str(fd)}
    with log.open("ab") if log is not None else nullcontext() as out:
        # A session of its own: Ctrl-C in the terminal is for rank 0, which completes the running step
        process = subprocess.Popen(
            command,
            env={**environment, **own},
            stdout=out,
            stderr=out and subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(fd,),
        )
    heartbeat.close_write_end()
    return process


def _exit_if_rank_died(followers: FollowerRanks) -> None:
    """Exit if a rank died and a collective call hangs."""
    while True:
        time.sleep(CHECK_INTERVAL_S)
        try:
            followers.kill_hung()
            followers.check()
        except RankDiedError as error:
            logger.error("%s", error)
            time.sleep(MAIN_THREAD_EXIT_TIMEOUT_S)
            logger.error("the main thread did not exit within %.0f s: killed", MAIN_THREAD_EXIT_TIMEOUT_S)
            os._exit(1)


def die_with_rank_zero() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pid = os.environ.get(RANK_ZERO_PID)
    die_with_parent(None if pid is None else int(pid))
