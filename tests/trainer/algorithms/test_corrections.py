import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.trainer.algorithms.corrections import (
    binary_kl,
    importance_weights,
    reduce_over_unit,
    within_bounds,
)
from offbeat.trainer.algorithms.m2po import second_moment_mask
from offbeat.trainer.algorithms.proximal import proximal_logprobs, proximal_share


def test_importance_weights_are_clipped_to_bounds():
    ratio = torch.tensor([3.0, -3.0, 0.5], dtype=torch.float64, requires_grad=True)
    got = importance_weights(ratio, 0.1, 2.0)
    torch.testing.assert_close(got, torch.tensor([2.0, 0.1, math.exp(0.5)], dtype=torch.float64))
    assert not got.requires_grad


def test_extreme_ratios_stay_finite():
    assert importance_weights(torch.tensor([1e4, -1e4]), 0.0, 2.0).tolist() == pytest.approx([2.0, 0.0], abs=1e-8)
    assert torch.isfinite(binary_kl(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))).all()


def test_bounds_are_inclusive_and_none_is_unbounded():
    values = torch.tensor([0.4, 0.5, 2.0, 2.1])
    assert within_bounds(values, 0.5, 2.0).tolist() == [False, True, True, False]
    assert within_bounds(values, None, 2.0).tolist() == [True, True, True, False]
    assert within_bounds(values, 0.5, None).tolist() == [False, True, True, True]


def test_unit_is_aggregated_as_a_whole():
    values, turn, sequence = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 2]), torch.tensor([4, 4, 4, 9])
    assert reduce_over_unit(values, "token", turn, sequence).tolist() == [1, 3, 5, 7]
    assert reduce_over_unit(values, "turn", turn, sequence).tolist() == [2, 2, 5, 7]
    assert reduce_over_unit(values, "geometric", turn, sequence).tolist() == [3, 3, 3, 7]
    assert reduce_over_unit(values, "sequence", turn, sequence).tolist() == [9, 9, 9, 7]


@settings(max_examples=30)
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_binary_kl_is_larger_of_both_directions(p: float, q: float):
    forward = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    backward = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    got = binary_kl(torch.tensor([p], dtype=torch.float64).log(), torch.tensor([q], dtype=torch.float64).log())
    assert float(got) == pytest.approx(max(forward, backward), abs=1e-9)
    assert float(got) >= 0


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0.0, 0.1, -0.3, 0.5, -1.0, 2.0]), max_size=12), st.floats(0.01, 2))
def test_m2po_drops_fewest_outliers_to_reach_threshold(log_ratio: list[float], threshold: float):
    squares = sorted(x * x for x in log_ratio)
    means = [math.fsum(squares[:n]) / n for n in range(1, len(squares) + 1)]
    assume(all(abs(mean - threshold) > 1e-12 * threshold for mean in means))  # there, rounding decides
    remaining = list(log_ratio)
    while remaining and sum(x * x for x in remaining) / len(remaining) > threshold:
        largest = max(x * x for x in remaining)
        remaining = [x for x in remaining if x * x < largest]
    limit = max((x * x for x in remaining), default=-1.0)
    got = second_moment_mask(torch.tensor(log_ratio, dtype=torch.float64), threshold)
    assert got.tolist() == [x * x <= limit for x in log_ratio]


def test_loglinear_proximal_policy_interpolates_by_version():
    share = proximal_share(torch.tensor([5, 4, 2, 6]), 5)
    assert share.tolist() == pytest.approx([0.0, 1 / 2, 3 / 4, 0.0])
    new = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    got = proximal_logprobs(new, torch.tensor([-2.0, -2.0, -2.0, -2.0]), share)
    assert got.tolist() == pytest.approx([-2.0, -1.5, -1.25, -2.0])
    assert not got.requires_grad
