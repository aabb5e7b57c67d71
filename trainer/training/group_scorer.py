"""Scores of frozen models, group by group.

Invariant: a group's scores depend only on the group, the model and the configuration, so any process may compute them
before the batch exists.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import Batch, MicroBatch, microbatches, pack
from offbeat.trainer.data.prefix_trees import shared_microbatches
from offbeat.trainer.engines.frozen import LogprobModel
from offbeat.trainer.models.distillation import TopQuery
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.packing import PackedInput


class EncodedScores(NamedTuple):
    """Scores as in `Group.scores`."""

    blob: bytes
    is_finite: bool


class GroupOutputs(NamedTuple):
    batch: Batch
    micro_batches: list[MicroBatch]
    parts: list[Tensor]


class GroupScorer:
    def __init__(self, model: LogprobModel, config: LearnerConfig, infer_batch_size: int | None) -> None:
        self._model = model
        self._config = config
        self._budget = inference_budget(config, infer_batch_size)

    def score(self, groups: Sequence[Group]) -> list[Tensor]:
        """Return logprobs per group, [M] float32 on the CPU, in the order of `pack([group])`."""
        return [scatter_outputs(*outputs) for outputs in self.infer(groups)]

    def encode(self, groups: Sequence[Group]) -> list[EncodedScores]:
        return [EncodedScores(encode_scores(row), bool(row.isfinite().all())) for row in self.score(groups)]

    def infer(self, groups: Sequence[Group], top: TopQuery | None = None) -> list[GroupOutputs]:
        """Return the model's outputs per group; with `top` the most probable tokens."""
        batches = [pack([group]) for group in groups]
        cuts = [self._cut(batch) for batch in batches]
        inputs = [replace(to_input(micro), top=top) for micro_batches in cuts for micro in micro_batches]
        outputs = iter(self._model.infer(inputs))
        return [
            GroupOutputs(batch, micro_batches, [next(outputs) for _ in micro_batches])
            for batch, micro_batches in zip(batches, cuts, strict=True)
        ]

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        if not batch.num_sampled:
            return []
        return cut(self._config, batch, range(batch.num_sequences), self._budget)


def cut(
    config: LearnerConfig, batch: Batch, sequences: Sequence[int], budget: int, *, multiple_of: int = 1
) -> list[MicroBatch]:
    pack_sequences = shared_microbatches if config.actor_train.model_args.shared_prefix else microbatches
    return pack_sequences(batch, sequences, budget, multiple_of=multiple_of)


def inference_budget(config: LearnerConfig, infer_batch_size: int | None = None) -> int:
    """Return the maximum tokens of a pass without gradient, by default as in training."""
    size = infer_batch_size or config.actor_train.infer_batch_size
    return config.actor_train.training_args.max_tokens_per_microbatch if size is None else size * config.sequence_length


def to_input(
    micro: MicroBatch,
    states: ReferenceStates | None = None,
    *,
    head_alone: bool = False,
    replays_routing: bool = False,
) -> PackedInput:
    """replays_routing: for the policy with `router_replay`; other models route by themselves."""
    packed = PackedInput.of(
        micro.tokens, micro.cu_seqlens, micro.positions, micro.temperatures, micro.images, micro.parents
    )
    reference = None if states is None else ReferenceStates(states.hidden[micro.index], states.head)
    routing = micro.routing if replays_routing else None
    return replace(packed, reference=reference, head_alone=head_alone, routing=routing)


def scatter_outputs(batch: Batch, micro_batches: Sequence[MicroBatch], parts: Sequence[Tensor]) -> Tensor:
    """Return values in batch order, [M] float32 on the CPU; zeros elsewhere."""
    values = torch.zeros(batch.num_sampled)
    for micro, part in zip(micro_batches, parts, strict=True):
        values[micro.index] = part.detach().to("cpu", torch.float32)
    return values


def encode_scores(scores: Tensor) -> bytes:
    return scores.numpy().astype("<f4").tobytes()


def decode_scores(group: Group, key: str) -> Tensor:
    """Return a group's scores, [M].

    Raises:
        ValueError: it has none under this key, or not one per sampled token.
    """
    blob = group.scores.get(key)
    num_sampled = sum(trajectory.num_sampled for trajectory in group.trajectories)
    if blob is None or len(blob) != 4 * num_sampled:
        found = "none" if blob is None else str(len(blob) // 4)
        raise ValueError(f"{group.group_id} needs {num_sampled} scores of {key}, and has {found}")
    return torch.from_numpy(np.frombuffer(blob, dtype="<f4").copy())
