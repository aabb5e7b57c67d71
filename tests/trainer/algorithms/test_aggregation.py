import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.aggregation import token_weights

lengths_of = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(lengths_of, st.integers(0, 10_000))
def test_token_weights_implement_each_mode(lengths: list[int], seed: int):
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    loss = torch.rand(len(sequence), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = [loss[sequence == s] for s in range(len(lengths))]
    expected = {
        "token-mean": loss.mean(),
        "seq-mean-token-sum": torch.stack([row.sum() for row in rows]).mean(),
        "seq-mean-token-mean": torch.stack([row.mean() for row in rows]).mean(),
    }
    for mode, value in expected.items():
        torch.testing.assert_close((token_weights(sequence, mode) * loss).sum(), value, rtol=1e-6, atol=1e-6)


def test_sequences_without_tokens_do_not_count():
    assert token_weights(torch.tensor([3, 3, 7]), "seq-mean-token-sum").tolist() == [0.5, 0.5, 0.5]
    assert token_weights(torch.tensor([3, 3, 7]), "seq-mean-token-mean").tolist() == [0.25, 0.25, 0.5]


def test_tokens_of_a_sequence_need_not_be_adjacent():
    assert token_weights(torch.tensor([3, 7, 3]), "seq-mean-token-mean").tolist() == [0.25, 0.5, 0.25]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_no_tokens_give_no_weights(mode: str):
    assert token_weights(torch.zeros(0, dtype=torch.int64), mode).shape == (0,)
