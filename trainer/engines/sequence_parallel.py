"""Sequence parallelism: each rank of a group computes a part of a row's tokens, and in attention a part of the heads over
all tokens (Ulysses, arXiv:2309.14509).

Invariant: outputs are whole on every rank of the group, which computes the same loss from them; the gradient of the
weights is the sum over the group.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.trainer.config.model_split import find_sequence_obstacle
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.attention import PACKED_ATTENTION
from offbeat.trainer.models.gated_delta import find_projections
from offbeat.trainer.models.packing import PackedInput, SequenceShard
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.models.recurrent_layers import recurrent_layers
from offbeat.trainer.models.vision import PackedVisionPolicy

KEYS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "layer_types")
"""Of a model's config, under these names or a family's own."""


class _Gather(torch.autograd.Function):
    """[*, k] of each rank -> [*, M]; as each rank has the same loss, its gradient is that of its own columns."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, owners: Tensor, shard: SequenceShard) -> Tensor:
        ctx.mine = mine = owners == shard.rank
        out = columns.new_zeros(*columns.shape[:-1], len(owners))
        out[..., mine] = columns
        dist.all_reduce(out, group=shard.group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][..., ctx.mine].contiguous(), None, None


def split_tokens(module: nn.Module, ranks: Ranks) -> "SequenceParallel":
    """Return the passes of a policy or critic, whose tokens consecutive ranks divide.

    Raises:
        ValueError: the model can't be split so.
    """
    size = ranks.ulysses_size
    model = cast(PreTrainedModel, module.model)
    config = model.config.get_text_config()
    obstacle = find_sequence_obstacle({key: getattr(config, key, None) for key in KEYS}, size)
    if isinstance(module, PackedVisionPolicy):
        obstacle = "a model with image input can't be split: take 1"
    elif any(find_projections(layer) is None for layer in recurrent_layers(model)):
        obstacle = f"recurrent layers of {config.model_type} are not divided by heads: take 1"
    elif config._attn_implementation != PACKED_ATTENTION:
        obstacle = f"attention of {config._attn_implementation} is computed with all heads: take 1"
    if obstacle:
        raise ValueError(f"actor_train.strategy_args.ulysses_size {size}: {obstacle}")
    group, _ = dist.new_subgroups(size)
    return SequenceParallel(module, cast(dist.ProcessGroup, group))


class SequenceParallel:
    """Passes of a model that are split over a group of ranks."""

    def __init__(self, module: Callable[[PackedInput], Any], group: dist.ProcessGroup) -> None:
        self._module = module
        self._group = group

    def __call__(self, x: PackedInput) -> Any:
        shard = SequenceShard.of(self._group, len(x.tokens))
        scored, valued = shard.owners(x.predictors), shard.owners(x.valued)
        output = self._module(_part_of(x, shard, scored == shard.rank, valued == shard.rank))

        def gather(columns: Tensor, owners: Tensor = scored) -> Tensor:
            return _Gather.apply(columns, owners, shard)

        if isinstance(output, Tensor):  # a critic's
            values = gather(output, valued)
            return values.view(2, -1) if x.with_next else values
        if not isinstance(output, Sampled):
            return tuple(gather(columns) for columns in output)
        divergences = None if output.divergences is None else gather(output.divergences)
        values = None if output.values is None else gather(output.values, valued)
        next_values = None
        if values is not None and x.with_next:
            values, next_values = values.chunk(2)
        return Sampled(gather(output.logprobs), gather(output.entropies), divergences, values, next_values)


def _part_of(x: PackedInput, shard: SequenceShard, scored: Tensor, valued: Tensor) -> PackedInput:
    """Return the input of this rank. scored: [M] bool, rows that it computes; valued: [M] or [2 M] bool, values."""
    rows = scored.nonzero()[:, 0]
    reference = x.reference and replace(x.reference, hidden=x.reference.hidden[rows])
    return replace(
        x,
        packing=replace(x.packing, shard=shard),
        positions=x.positions[rows],
        temperatures=None if x.temperatures is None else x.temperatures[rows],
        reference=reference,
        distillation=x.distillation and x.distillation.at(rows),
        with_next=False,
        value_rows=x.valued[valued] - shard.start,
    )
