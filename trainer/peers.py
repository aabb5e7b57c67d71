"""Several learner processes: rank 0 leads and tells the others each collective call; they follow.

Invariant: every rank makes the same calls on its trainer in the same order; groups travel as msgpack.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgpack
from torch import Tensor

from services.codec import decode_trajectory, encode_trajectory
from services.schema import Group
from trainer.engines.processes import Ranks, broadcast
from trainer.policy_trainer import Trainer
from trainer.step import Gauges
from trainer.warm_start import Progress

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class LeadingTrainer:
    """Rank 0's trainer: says each call aloud before it makes it."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks

    @property
    def kl_coef(self) -> float:
        """See `Trainer.kl_coef`."""
        return self._trainer.kl_coef

    def begin(self, progress: Progress, stopped: Callable[[], bool]) -> bool:
        """See `Trainer.begin`. The others can't hear of a stop, so with peers it waits for the warm start's end."""
        self._say("begin")
        alone = self._ranks.world_size == 1
        return self._trainer.begin(progress, stopped if alone else _never)

    def steer(self, learning_rate: float) -> None:
        """See `Trainer.steer`."""
        self._say("steer", learning_rate)
        self._trainer.steer(learning_rate)

    def train(self, groups: Sequence[Group], step: int) -> Gauges:
        """See `Trainer.train`."""
        self._say("train", [_pack_group(group) for group in groups], step)
        return self._trainer.train(groups, step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer.tensors`; must be used up."""
        self._say("tensors")
        yield from self._trainer.tensors()

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        self._say("save", str(folder))
        self._trainer.save(folder)

    def load(self, folder: Path, kl_coef: float) -> None:
        """See `Trainer.load`."""
        self._say("load", str(folder), kl_coef)
        self._trainer.load(folder, kl_coef)

    def dismiss(self) -> None:
        """Let the followers end."""
        self._say("end")

    def _say(self, *command: object) -> None:
        if self._ranks.world_size > 1:
            broadcast(self._ranks, cast(bytes, msgpack.packb(command)))


def follow(trainer: Trainer, ranks: Ranks) -> None:
    """Do what rank 0 does, until it says `end`."""
    while True:
        name, *arguments = cast(list[Any], msgpack.unpackb(broadcast(ranks)))
        match name:
            case "begin":
                trainer.begin(lambda _done, _total: None, _never)
            case "steer":
                trainer.steer(arguments[0])
            case "train":
                trainer.train([_unpack_group(each) for each in arguments[0]], arguments[1])
            case "tensors":
                for _ in trainer.tensors():
                    pass
            case "save":
                trainer.save(Path(arguments[0]))
            case "load":
                trainer.load(Path(arguments[0]), arguments[1])
            case _:
                return


def _never() -> bool:
    return False


def _pack_group(group: Group) -> list[object]:
    members = [encode_trajectory(trajectory) for trajectory in group.trajectories]
    head = [group.entry_id, group.group_id, group.number, group.tag, group.seed, group.admitted_version]
    return [*head, group.temperature, members]


def _unpack_group(body: list[Any]) -> Group:
    *head, temperature, members = body
    return Group(*head, trajectories=tuple(decode_trajectory(member) for member in members), temperature=temperature)


@contextmanager
def peers(num_processes: int, command: Sequence[str]) -> Iterator[None]:
    """Start ranks 1 to `num_processes - 1` on this host with `command`, unless a launcher (torchrun) has done so.

    They end when rank 0 does, however it ends.
    """
    if num_processes == 1 or "WORLD_SIZE" in os.environ:
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes)}
    os.environ.update(address, RANK="0", LOCAL_RANK="0")
    running = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(1, num_processes)
    ]
    try:
        yield
        for process in running:
            process.wait(timeout=30)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def die_with_leader() -> None:
    """End when the process that started this one ends; leave Ctrl-C and SIGTERM to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
