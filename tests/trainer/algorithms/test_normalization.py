import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.normalization import has_signal, normalize_by_group, whiten

rows_of = st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=20)


@given(rows_of)
def test_rewards_are_normalized_within_their_group(rows: list[tuple[int, float]]):
    groups = torch.tensor([g for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    centered = normalize_by_group(rewards, groups)
    scaled = normalize_by_group(rewards, groups, scale=True)
    for i, (g, r) in enumerate(rows):
        siblings = [reward for number, reward in rows if number == g]
        if len(siblings) == 1:
            assert (centered[i], scaled[i]) == (0, 0)
            continue
        mean, std = statistics.fmean(siblings), statistics.stdev(siblings)
        assert float(centered[i]) == pytest.approx(r - mean, abs=1e-9)
        assert float(scaled[i]) == pytest.approx((r - mean) / (std + 1e-6) if std > 1e-6 else 0.0, abs=1e-6)


@given(rows_of, st.randoms())
def test_result_does_not_depend_on_trajectory_order(rows: list[tuple[int, float]], random):
    order = list(range(len(rows)))
    random.shuffle(order)
    groups = torch.tensor([g for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    shuffled = normalize_by_group(rewards[order], groups[order], scale=True)
    torch.testing.assert_close(shuffled, normalize_by_group(rewards, groups, scale=True)[order], rtol=1e-6, atol=1e-6)


def test_single_or_equal_rewards_give_zero():
    assert normalize_by_group(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]
    assert (
        normalize_by_group(torch.full((8,), 0.1), torch.zeros(8, dtype=torch.int64), scale=True).tolist() == [0.0] * 8
    )
    assert normalize_by_group(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_signal_requires_different_rewards():
    assert has_signal(torch.tensor([0.0, 1.0]))
    assert not has_signal(torch.tensor([1.0, 1.0, 1.0]))
    assert not has_signal(torch.tensor([1.0]))
    assert not has_signal(torch.zeros(0))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_whitened_values_have_mean_zero_and_unbiased_deviation_one(values: list[float]):
    white = whiten(torch.tensor(values, dtype=torch.float64))
    deviation = statistics.stdev(values)
    expected = [(x - statistics.fmean(values)) / (deviation + 1e-6) for x in values]
    torch.testing.assert_close(white, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_whitening_keeps_fewer_than_two_values():
    assert whiten(torch.tensor([5.0])).tolist() == [5.0]
    assert whiten(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("num_values", [2, 7, 1000])
def test_whitening_equal_values_gives_zeros(num_values: int):
    """float32: the deviation of equal values of .7 was 6e-8, and they were whitened to .19."""
    assert whiten(torch.full((num_values,), 0.7)).tolist() == [0.0] * num_values
