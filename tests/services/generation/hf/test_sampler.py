"""Sampled tokens follow the distribution that their logprobs name."""

from dataclasses import replace

import pytest
import torch

from offbeat.services.generation.hf.sampler import find_top, sample, truncate
from offbeat.services.messages.types import Sampling

VOCABULARY = 16


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def expected(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[V] probabilities by a plain loop in float64."""
    scaled = row.double() / (sampling.temperature or 1.0)
    if not sampling.temperature:
        return scaled.softmax(-1)
    ranked = sorted(range(VOCABULARY), key=lambda token: -float(scaled[token]))
    kept = ranked[: sampling.top_k] if sampling.top_k > 0 else ranked
    total = sum(float(scaled[token].exp()) for token in kept)
    mass, nucleus = 0.0, list[int]()
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += float(scaled[token].exp()) / total
    out = torch.zeros(VOCABULARY, dtype=torch.float64)
    out[nucleus] = scaled[nucleus].softmax(-1)
    return out


PARAMETERS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7, top_k=3),
    Sampling(top_p=0.8),
    Sampling(temperature=1.3, top_k=6, top_p=0.5),
    Sampling(temperature=0.0, top_k=2, top_p=0.1),
    Sampling(top_p=0.001),
    Sampling(top_k=100),
]


def test_logprobs_of_a_mixed_batch_are_each_rows_own() -> None:
    rows = logits(len(PARAMETERS))
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        ids, logprobs, _ = sample(rows, PARAMETERS, generator)
        for row, sampling, token, logprob in zip(rows, PARAMETERS, ids, logprobs, strict=True):
            assert abs(float(expected(row, sampling)[token].log()) - logprob) < 1e-5


@pytest.mark.parametrize("sampling", PARAMETERS)
def test_frequencies_are_the_probabilities(sampling: Sampling) -> None:
    """Within five standard errors; greedy requests always give the best token."""
    count, (row,) = 20_000, logits(1)
    ids, *_ = sample(row.expand(count, -1), [sampling] * count, torch.Generator().manual_seed(2))
    found = torch.bincount(torch.tensor(ids), minlength=VOCABULARY) / count
    if not sampling.temperature:
        assert found[row.argmax()] == 1
        return
    wanted = expected(row, replace(sampling))
    assert ((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()


def test_top_tokens_are_the_most_likely_that_can_be_sampled() -> None:
    rows = logits(len(PARAMETERS))
    _, _, distributions = sample(rows, PARAMETERS, torch.Generator().manual_seed(1))
    for row, sampling, top in zip(rows, PARAMETERS, find_top(distributions, 5), strict=True):
        wanted = expected(row, sampling)
        possible = [token for token in wanted.argsort(descending=True).tolist() if wanted[token] > 0][:5]
        assert list(top.ids) == possible
        torch.testing.assert_close(torch.tensor(top.logprobs).double(), wanted[possible].log(), atol=1e-5, rtol=0)
    assert find_top(distributions, 0) == []
    assert len(find_top(distributions, 100)[0].ids) == VOCABULARY


def test_equal_logits_at_the_border_of_top_k_are_all_kept() -> None:
    kept = truncate(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.tensor([[1]]), torch.tensor([[1.0]]))
    assert kept.tolist() == [[-torch.inf, 2.0, 2.0, -torch.inf]]
