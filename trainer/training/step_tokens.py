"""Sampled tokens of a trained batch, and their file beside the recorded one.

Tokens are in the order of their trajectory's turns, as in `Batch`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import msgpack
import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.batch import Batch
from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.losses.targets import Targets
from offbeat.trainer.losses.token_outcomes import token_outcomes
from offbeat.trainer.training.recorded_steps import TOKENS_SCHEMA


@dataclass(frozen=True, slots=True)
class StepTokens:
    version: int
    """Produced by the step."""
    groups: tuple[Group, ...]
    batch: Batch
    targets: Targets
    logprobs: Tensor
    """Policy's in the first pass, [M]; NaN where untrained."""
    config: AlgorithmConfig

    def encode(self) -> bytes:
        outcomes = token_outcomes(self.config, self.logprobs, self.targets)
        columns = (outcomes.logprobs, outcomes.ratio, outcomes.advantages, outcomes.outcome)
        borders = torch.searchsorted(self.batch.trajectory, torch.arange(self.batch.num_trajectories + 1)).tolist()
        members = [(group.number, trajectory.index) for group in self.groups for trajectory in group.trajectories]
        rows = [
            [number, index, *(column[start:end].numpy().tobytes() for column in columns)]
            for (number, index), (start, end) in zip(members, pairwise(borders), strict=True)
        ]
        return cast(bytes, msgpack.packb([TOKENS_SCHEMA, self.version, rows]))


def merge_seen(seen: Tensor, ranks: Ranks) -> Tensor | None:
    """Return all ranks' logprobs on rank 0, NaN where none has any; collective."""
    if ranks.world_size == 1:
        return seen
    blobs = gather(ranks, seen.numpy().tobytes())
    if ranks.rank > 0:
        return None
    parts = torch.stack([torch.frombuffer(bytearray(blob), dtype=torch.float32) for blob in blobs])
    known = ~parts.isnan()
    return torch.where(known.any(0), parts.gather(0, known.int().argmax(0, keepdim=True))[0], math.nan)
