"""Data-parallel process group.

Invariants: a single process opens no port; messages are bytes, never pickles.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

COMMAND_TIMEOUT = timedelta(days=7)
"""Long, as rank 0 waits for trajectories."""


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    word: dist.ProcessGroup | None = None
    """For rank 0's commands."""
    tp_size: int = 1
    """Consecutive ranks over which layers are split."""
    pp_size: int = 1
    """Pipeline stages, each of `tp_size` consecutive ranks, the last stage first: rank 0 computes losses."""

    @property
    def copy_size(self) -> int:
        """Return the number of consecutive ranks with one copy of the weights and the same micro-batches."""
        return self.tp_size * self.pp_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.copy_size

    @property
    def data_size(self) -> int:
        """Return the number of parts of a batch."""
        return self.world_size // self.copy_size

    @property
    def is_first_of_copy(self) -> bool:
        return self.rank % self.copy_size == 0

    @property
    def stage(self) -> int:
        """Pipeline stage, from the embeddings."""
        return self.pp_size - 1 - self.rank % self.copy_size // self.tp_size


def ranks_of_environment(device: str) -> Ranks:
    """Read ranks set by torchrun or Offbeat's launcher."""
    rank, local, world = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT.items())
    return Ranks(rank, local, world, torch.device("cuda", local) if device == "cuda" else torch.device("cpu"))


_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def broadcast(ranks: Ranks, message: bytes = b"") -> bytes:
    """Send rank 0's message to all ranks and return it.

    Raises:
        RuntimeError: not within a `process_group`.
    """
    if ranks.world_size == 1:
        return message
    if ranks.word is None:
        raise RuntimeError("these ranks have joined no process group")
    length = torch.tensor([len(message)])
    dist.broadcast(length, src=0, group=ranks.word)
    body = torch.zeros(int(length), dtype=torch.uint8)
    if ranks.rank == 0:
        body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(body, src=0, group=ranks.word)
    return body.numpy().tobytes()


def gather(ranks: Ranks, message: bytes) -> list[bytes]:
    if ranks.world_size == 1:
        return [message]
    lengths = [torch.zeros(1, dtype=torch.int64, device=ranks.device) for _ in range(ranks.world_size)]
    dist.all_gather(lengths, torch.tensor([len(message)], device=ranks.device))
    max_length = max(1, *(int(length) for length in lengths))
    mine = torch.zeros(max_length, dtype=torch.uint8, device=ranks.device)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else mine[:0]
    bodies = [torch.zeros_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(bodies, mine)
    return [body.cpu().numpy().tobytes()[: int(n)] for body, n in zip(bodies, lengths, strict=True)]


@contextmanager
def process_group(ranks: Ranks, timeout_min: float = 30.0) -> Iterator[Ranks]:
    """Join the process group; yield the ranks with their command group.

    timeout_min: `ActorTrainConfig.backend_timeout`.
    """
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.local_rank), WORLD_SIZE=str(ranks.world_size))
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    else:
        timeout = timedelta(minutes=timeout_min)
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
        ranks = replace(ranks, word=cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)))
    try:
        yield ranks
    finally:
        _leave()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _leave() -> None:
    """Destroy the process group, through DeepSpeed if in use."""
    deepspeed = cast(Any, sys.modules.get("deepspeed"))
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()
