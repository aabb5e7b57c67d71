"""Process groups of a learner's world: the policy's ranks, and those of a critic with processes of its own.

Each role has torch's default group for itself; one more group connects all ranks.

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
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from offbeat.trainer.engines.node_ranks import RANKS_PER_NODE, critic_ranks, decode_ranks

COMMAND_TIMEOUT = timedelta(days=7)
"""Long, as rank 0 waits for trajectories."""


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a learner."""

    rank: int
    size: int
    critics: tuple[int, ...] = ()
    """Ranks of a critic with processes of its own."""
    group: Any = None
    """gloo, for commands and what critic and policy exchange; None: not joined, or a single rank."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of one role, the policy or a critic with processes of its own."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    world: World | None = None
    """None: this role's ranks alone."""
    tp_size: int = 1
    """Consecutive ranks over which layers are split."""
    pp_size: int = 1
    """Pipeline stages, each of `tp_size` consecutive ranks, the last stage first: rank 0 computes losses."""
    ulysses_size: int = 1
    """Consecutive ranks over which the tokens of a pass are split; without other splits."""

    @property
    def critics(self) -> tuple[int, ...]:
        """Return the world's ranks that have the critic; none if the policy's have it."""
        return () if self.world is None else self.world.critics

    @property
    def is_critic(self) -> bool:
        return self.world is not None and self.world.rank in self.world.critics

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1 and not self.critics

    @property
    def copy_size(self) -> int:
        """Return the number of consecutive ranks with the same micro-batches."""
        return self.tp_size * self.pp_size * self.ulysses_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.copy_size

    @property
    def data_size(self) -> int:
        """Return the number of parts of a batch."""
        return self.world_size // self.copy_size

    @property
    def num_shards(self) -> int:
        """Return the number of ranks over which weights are sharded and gradients are averaged."""
        return self.data_size * self.ulysses_size

    @property
    def is_first_of_copy(self) -> bool:
        return self.rank % self.copy_size == 0

    @property
    def stage(self) -> int:
        """Pipeline stage, from the embeddings."""
        return self.pp_size - 1 - self.rank % self.copy_size // self.tp_size


def ranks_of_environment(device: str) -> Ranks:
    """Read ranks set by torchrun or Offbeat's launcher."""
    rank, local, size = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT.items())
    world = World(rank, size, critic_ranks(decode_ranks(os.environ.get(RANKS_PER_NODE, ""))))
    role = [each for each in range(size) if (each in world.critics) == (rank in world.critics)]
    torch_device = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    return Ranks(role.index(rank), local, len(role), torch_device, world)


STOP, CONTINUE, READY = b"1", b"0", b"2"
"""Broadcast during a warm start: values of `should_stop`; the first weights are complete."""
_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def broadcast(ranks: Ranks, message: bytes = b"", root: int = 0) -> bytes:
    """Send the message of the world's rank `root` to all ranks and return it.

    Raises:
        RuntimeError: not within a `process_group`.
    """
    if ranks.is_alone:
        return message
    world = ranks.world
    if world is None or world.group is None:
        raise RuntimeError("these ranks have joined no process group")
    options = dist.BroadcastOptions()
    options.rootRank = root
    length = torch.tensor([len(message)])
    world.group.broadcast([length], options).wait()
    body = torch.zeros(int(length), dtype=torch.uint8)
    if world.rank == root and message:
        body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    world.group.broadcast([body], options).wait()
    return body.numpy().tobytes()


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks of the world."""
    if ranks.world is not None and ranks.world.group is not None:
        ranks.world.group.barrier().wait()


def gather(ranks: Ranks, message: bytes) -> list[bytes]:
    """Return the messages of a role's ranks."""
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
    """Join the process groups of the role and of the world; yield the ranks with the latter.

    timeout_min: `ActorTrainConfig.backend_timeout`.
    """
    world = ranks.world or World(ranks.rank, ranks.world_size)
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    store: Store = HashStore()
    timeout = timedelta(minutes=timeout_min)
    if world.size > 1:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
        group = dist.ProcessGroupGloo(PrefixStore("world", store), world.rank, world.size, COMMAND_TIMEOUT)
        ranks = replace(ranks, world=replace(world, group=group))
        store = PrefixStore("critic" if ranks.is_critic else "policy", store)
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.local_rank), WORLD_SIZE=str(ranks.world_size))
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
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
    """Destroy the process group, through DeepSpeed if in use, and Megatron's references to it."""
    megatron = cast(Any, sys.modules.get("megatron.core.parallel_state"))
    if megatron is not None:
        megatron.destroy_model_parallel()
    deepspeed = cast(Any, sys.modules.get("deepspeed"))
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()
