"""Teachers by another engine give what a teacher of torch gives."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from offbeat.trainer.algorithms.divergences import DivergenceTerms
from offbeat.trainer.engines.prompt_model import PromptModel
from offbeat.trainer.models.distillation import Distillation, TeacherTokens, TopQuery, teacher_divergence, top_logprobs
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


class Float32Engine:
    """An engine of float32 logits, as vLLM is."""

    def __init__(self, logits: Tensor, k: int) -> None:
        self._top = logits.float().log_softmax(1).topk(k, dim=1)

    def score(self, _: Sequence[Sequence[int]]) -> list[Top]:
        return [Top(self._top.indices, self._top.values.double())]


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


@pytest.mark.parametrize("objective", ["reverse_kl", "adaptive_kl", "forward_kl"])
@pytest.mark.parametrize("margin", [8.0, 16.0, 20.0, 24.0])
def test_a_teacher_sure_of_a_token_costs_what_its_whole_distribution_does(objective: str, margin: float):
    """Margins leave 2e-3 to 3e-10 for tokens that are not among the first 64."""
    generator = torch.Generator().manual_seed(0)
    size, k, rows = 2000, 64, 100
    logits = 2 * torch.randn(rows, size, generator=generator)
    logits[:, 0] = logits.max(1).values + margin
    x = PackedInput.of(torch.zeros(rows + 1, dtype=torch.int64), torch.tensor([0, rows + 1]), torch.arange(1, rows + 1))
    (got,) = PromptModel(Float32Engine(logits, k)).infer([replace(x, top=TopQuery(k, 1.0, size))])
    student = 0.6 * logits.double()
    found, wanted = (
        _divergence(objective, student, top, k) for top in (got, top_logprobs(logits, TopQuery(k, 1.0, size)))
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm()) < 0.02 * float(theirs.norm()) + 2e-3 * math.sqrt(rows)


def _divergence(objective: str, student: Tensor, top: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row and its gradient."""
    teacher = TeacherTokens(top[:k].T.long(), top[k:].T.contiguous(), torch.ones(len(student)))
    logits = student.clone().requires_grad_()
    values = teacher_divergence(logits, Distillation(objective, DivergenceTerms(), 1.0, True, (teacher,)))
    values.sum().backward()
    assert logits.grad is not None
    return values.detach(), logits.grad
