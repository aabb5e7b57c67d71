"""Teachers by another engine give what a teacher of torch gives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.engines.prompt_model import PromptModel
from offbeat.trainer.models.distillation import TopQuery, top_logprobs
from offbeat.trainer.models.packing import PackedInput

SIZE, K = 11, 3


class Top(NamedTuple):
    ids: Tensor
    logprobs: Tensor


def logits_of(tokens: Sequence[int]) -> Tensor:
    """Logits after each token, which depend on it and on its place."""
    return torch.stack(
        [torch.sin(torch.arange(SIZE) * (token + 1.7) + place) for place, token in enumerate(tokens)]
    ).double()


class TorchEngine:
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Top]:
        tops = [logits_of(tokens)[:-1].log_softmax(1).topk(K, dim=1) for tokens in sequences]
        return [Top(top.indices, top.values) for top in tops]


def test_packed_tokens_have_their_own_sequences_distributions():
    sequences = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])
    tokens = torch.tensor([token for tokens in sequences for token in tokens])
    cuts = torch.tensor([0, 5, 8, 12])
    positions = torch.tensor([2, 4, 6, 9, 10, 11])
    x = replace(PackedInput.of(tokens, cuts, positions), top=TopQuery(K, 1.0, SIZE))
    rows = torch.cat(
        [logits_of(each)[[p - 1 for p in at]] for each, at in zip(sequences, ((2, 4), (1,), (1, 2, 3)), strict=True)]
    )
    (got,) = PromptModel(TorchEngine()).infer([x])
    torch.testing.assert_close(got, top_logprobs(rows, TopQuery(K, 1.0, SIZE)), rtol=0, atol=1e-12)
