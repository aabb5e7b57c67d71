"""Ranks of a learner: rank 0 broadcasts each collective call, the other ranks follow.

Invariant: every rank makes the same calls on its trainer in the same order; groups travel as msgpack.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgpack
from torch import Tensor

from offbeat.services.errors import MeshError
from offbeat.services.messages.types import Group
from offbeat.services.process import die_with_parent, free_port
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.engines.process_group import Ranks, broadcast
from offbeat.trainer.process.heartbeat import PULSE, Heartbeat
from offbeat.trainer.training.optimizer_step import Gauges
from offbeat.trainer.training.policy_trainer import Trainer
from offbeat.trainer.warm_start.train import Progress

logger = logging.getLogger(__name__)

STOP, GO = b"1", b"0"
"""Broadcast values of `stopped`."""
LEADER = "OFFBEAT_LEADER_PID"
"""Environment variable: the process that a follower ends with."""
BLAME_S = 2.0
"""Delay with which a rank's death may be seen after its connection broke."""
DISMISSED_S = 30.0
"""Time that a follower has to exit after it was stopped."""
STUCK_S = 15.0
"""Time that the main thread has to exit after a rank died."""
LOOK_S = 1.0
"""Upper bound of the delay with which a rank's exit is noticed."""


class RankZeroTrainer:
    """Rank 0's trainer: broadcasts each call to the other ranks, then runs it."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks

    @property
    def kl_coef(self) -> float:
        return self._trainer.kl_coef

    def begin(self, progress: Progress, stopped: Callable[[], bool]) -> bool:
        """Each value of `stopped` is broadcast, so that all ranks stop at the same step."""
        self._broadcast("begin")
        return self._trainer.begin(progress, lambda: broadcast(self._ranks, STOP if stopped() else GO) == STOP)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._broadcast("steer", learning_rate)
        self._trainer.set_learning_rate(learning_rate)

    def train(self, groups: Sequence[Group], step: int, silent: MaskedCounts, weights: Sequence[float] = ()) -> Gauges:
        self._broadcast("train", [pack_group(group) for group in groups], step, silent, list(weights))
        return self._trainer.train(groups, step, silent, weights)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer.tensors`; must be used up."""
        self._broadcast("tensors")
        yield from self._trainer.tensors()

    def save(self, folder: Path) -> None:
        self._broadcast("save", str(folder))
        self._trainer.save(folder)

    def load(self, folder: Path, kl_coef: float) -> None:
        self._broadcast("load", str(folder), kl_coef)
        self._trainer.load(folder, kl_coef)

    def stop_followers(self) -> None:
        """Stop the follower ranks."""
        self._broadcast("end")

    def _broadcast(self, *command: object) -> None:
        if self._ranks.world_size > 1:
            broadcast(self._ranks, cast(bytes, msgpack.packb(command)))


def follow_rank_zero(trainer: Trainer, ranks: Ranks) -> None:
    """Repeat rank 0's calls until it sends `end`."""
    while True:
        name, *arguments = cast(list[Any], msgpack.unpackb(broadcast(ranks)))
        match name:
            case "begin":
                trainer.begin(lambda _done, _total: None, lambda: broadcast(ranks) == STOP)
            case "steer":
                trainer.set_learning_rate(arguments[0])
            case "train":
                groups, step, silent, loss_weights = arguments
                trainer.train([unpack_group(each) for each in groups], step, MaskedCounts(*silent), loss_weights)
            case "tensors":
                for _ in trainer.tensors():
                    pass
            case "save":
                trainer.save(Path(arguments[0]))
            case "load":
                trainer.load(Path(arguments[0]), arguments[1])
            case _:
                return


class RankDiedError(MeshError):
    """One of the learner's processes ended while it was needed; the learner as a whole ends with it."""


class FollowerRanks:
    """Ranks 1 to N - 1 of this host, started by rank 0; they end when rank 0 does, however it ends."""

    def __init__(self, running: Sequence["subprocess.Popen[bytes]"] = (), pulses: Sequence[Heartbeat] = ()) -> None:
        """pulses: of the same ranks."""
        self._running = running
        self._pulses = pulses
        self._ending = False

    def check(self) -> None:
        """Raises `RankDiedError` if one has ended."""
        for rank, process in enumerate(self._running, start=1):
            code = None if self._ending else process.poll()
            if code:  # 0: it was dismissed
                how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
                raise RankDiedError(
                    f"rank {rank} (pid {process.pid}) {how}: all {len(self._running) + 1} processes end with it. "
                    f"Its log is logs/learner-{rank}.log"
                )

    def kill_hung(self) -> None:
        """End those that are stopped or don't run any more; their death then ends all."""
        for rank, (process, pulse) in enumerate(zip(self._running, self._pulses, strict=True), start=1):
            silent_s = pulse.silence_s()
            if silent_s and process.poll() is None:
                logger.error(
                    "rank %d (pid %d) has given no sign of life for %.0f s: killed", rank, process.pid, silent_s
                )
                process.kill()

    def raise_if_rank_died(self) -> None:
        """After a failed collective call: raise `RankDiedError` if a rank's death is why."""
        deadline = time.monotonic() + BLAME_S
        while self._running and time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)

    def wait(self) -> None:
        """Wait for all to end after they were dismissed."""
        for process in self._running:
            process.wait(timeout=DISMISSED_S)

    def kill(self) -> None:
        """End those that still run."""
        self._ending = True
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def peers(num_processes: int, command: Sequence[str], silent_s: float) -> Iterator[FollowerRanks]:
    """Start ranks 1 to `num_processes - 1` on this host with `command`, unless a launcher (torchrun) has started them.

    silent_s: silence after which a rank is killed.
    """
    if num_processes == 1 or "WORLD_SIZE" in os.environ:
        yield FollowerRanks()
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    os.environ.update(address, RANK="0", LOCAL_RANK="0")
    # Sessions of their own: Ctrl-C in the terminal is for rank 0, which lets the running step end
    pulses = [Heartbeat(silent_s) for _ in range(1, num_processes)]
    started = FollowerRanks([_follower(command, rank, pulse) for rank, pulse in enumerate(pulses, start=1)], pulses)
    threading.Thread(target=_end_with_the_dead, args=(started,), name="peers", daemon=True).start()
    try:
        yield started
        started.wait()
    finally:
        started.kill()


def _follower(command: Sequence[str], rank: int, pulse: Heartbeat) -> "subprocess.Popen[bytes]":
    end = pulse.write_end
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), LEADER: str(os.getpid()), PULSE: str(end)}
    process = subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True, pass_fds=(end,))
    pulse.handed_over()
    return process


def _end_with_the_dead(started: FollowerRanks) -> None:
    """End this process if a rank has died and the main thread, in a collective call that never returns, can't see it."""
    while True:
        time.sleep(LOOK_S)
        try:
            started.kill_hung()
            started.check()
        except RankDiedError as error:
            logger.error("%s", error)
            time.sleep(STUCK_S)
            logger.error("still here after %s s: ends now", STUCK_S)
            os._exit(1)


def die_with_leader() -> None:
    """End when the process that started this one ends; leave Ctrl-C and SIGTERM to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    leader = os.environ.get(LEADER)
    die_with_parent(None if leader is None else int(leader))
