import math

import torch

from trainer.algorithms.corrections import truncated_importance_weights


def test_importance_weights_are_capped_above_only():
    old = torch.tensor([0.0, -3.0, -1.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-3.0, 0.0, -1.5], dtype=torch.float64)
    got = truncated_importance_weights(old, behavior, 2.0)
    torch.testing.assert_close(got, torch.tensor([2.0, math.exp(-3.0), math.exp(0.5)], dtype=torch.float64))
    assert not got.requires_grad


def test_extreme_ratios_stay_finite():
    assert truncated_importance_weights(torch.tensor([0.0]), torch.tensor([-1e4]), 2.0).tolist() == [2.0]
