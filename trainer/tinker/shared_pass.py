"""Gradients of several models from one pass of the base model.

Invariant: a model's result depends on the others by the lengths of their sequences alone, since no operation mixes rows
but those of one sequence: sequences of these lengths in their places repeat it to the bit.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from offbeat.services.tinker.records import SharedPass
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.tinker.adapters import AdapterPool, Span
from offbeat.trainer.tinker.client_model import ClientModel, Scores, pack, score
from offbeat.trainer.tinker.losses import Loss, Settings

STAND_IN_TOKEN = 0


@dataclass(frozen=True, slots=True)
class GradientBatch:
    """Sequences of a model, whose gradient is to be added."""

    model: ClientModel
    data: Sequence[Datum]
    loss: Loss
    settings: Settings

    @property
    def lengths(self) -> list[int]:
        return [len(datum.tokens) for datum in self.data]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def compute_shared(pool: AdapterPool, batches: Sequence[GradientBatch]) -> list[Scores]:
    """Add the gradients of different models' batches; a failure leaves all unchanged."""
    return _compute(pool, [(batch, batch.lengths) for batch in batches])


def repeat_shared(pool: AdapterPool, batch: GradientBatch, recorded: SharedPass) -> Scores:
    """Add a batch's gradient as a pass with others has added it before."""
    around = [(None, recorded.before), (batch, batch.lengths), (None, recorded.after)]
    (scores,) = _compute(pool, [(each, lengths) for each, lengths in around if lengths])
    return scores


def record_shared(batches: Sequence[GradientBatch]) -> list[SharedPass]:
    """Return what repeats each batch's part of their pass."""
    lengths = [batch.lengths for batch in batches]
    return [
        SharedPass(before=list(chain(*lengths[:i])), after=list(chain(*lengths[i + 1 :]))) for i in range(len(lengths))
    ]


def _compute(pool: AdapterPool, parts: Sequence[tuple[GradientBatch | None, list[int]]]) -> list[Scores]:
    """parts: batches, or None for sequences of these lengths in their place."""
    batches = [batch for batch, _ in parts if batch is not None]
    spans = [Span(None if batch is None else batch.model.adapter, sum(lengths)) for batch, lengths in parts]
    tokens = torch.cat([_tokens(batch, lengths) for batch, lengths in parts]).to(pool.device)
    borders = torch.tensor([0, *(each for _, lengths in parts for each in lengths)]).cumsum(0).to(pool.device)
    with ExitStack() as stack:
        for batch in batches:
            stack.enter_context(batch.model.accumulating())
        with pool.routed(spans):
            logits = pool.logits(tokens, borders).split([span.num_tokens for span in spans])
        scored = [
            score(rows, batch.data, batch.loss, batch.settings)
            for rows, (batch, _) in zip(logits, parts, strict=True)
            if batch is not None
        ]
        torch.stack([each.total for each in scored]).sum().backward()
    results = [each.detach() for each in scored]
    for batch, scores in zip(batches, results, strict=True):
        batch.model.count(scores, batch.data)
    return results


def _tokens(batch: GradientBatch | None, lengths: Sequence[int]) -> Tensor:
    return torch.full((sum(lengths),), STAND_IN_TOKEN) if batch is None else pack(batch.data)[0]
