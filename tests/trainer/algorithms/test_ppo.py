import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms import ppo
from offbeat.trainer.algorithms.ratio import TokenLosses, token_ratio

logprob = st.floats(-6, -0.01)
rows_of = st.lists(st.tuples(logprob, logprob, st.floats(-2, 2)), min_size=1, max_size=12)


def clipped_surrogate(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, **bounds) -> TokenLosses:
    return ppo.clipped_surrogate(token_ratio(new, old), advantages, **bounds)


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(rows_of, st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.none() | st.floats(1.1, 5))
def test_clipped_surrogate_equals_its_definition(
    rows: list[tuple[float, float, float]], low: float, high: float, dual: float | None
):
    new, old, advantage = float64(*(x for row in rows for x in row)).reshape(-1, 3).T
    got = clipped_surrogate(new, old, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    for i, (n, o, a) in enumerate(rows):
        ratio = math.exp(n - o)
        surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        if a < 0 and dual is not None:
            surrogate = max(surrogate, dual * a)
        assert float(got.loss[i]) == pytest.approx(-surrogate, rel=1e-9, abs=1e-12)
        assert float(got.ratio[i]) == pytest.approx(ratio, rel=1e-9)


@given(rows_of)
def test_ppo_gradient_at_ratio_one_equals_reinforce(rows: list[tuple[float, float, float]]):
    new, _, advantage = float64(*(x for row in rows for x in row)).reshape(-1, 3).T
    new = new.clone().requires_grad_()
    loss = clipped_surrogate(new, new.detach(), advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, -advantage)


def test_clip_removes_gradient_only_beyond_the_trust_region():
    new = float64(math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)).requires_grad_()
    out = clipped_surrogate(new, torch.zeros_like(new), float64(1, -1, 1, -1), clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    assert out.clipped.tolist() == [True, False, False, True]
    torch.testing.assert_close(gradient, float64(0.0, 1.5, -0.5, 0.0))


def test_clip_bounds_are_independent():
    new = float64(math.log(1.25), math.log(0.75))
    advantage = float64(1, -1)
    wide_above = clipped_surrogate(new, torch.zeros(2), advantage, clip_low=0.2, clip_high=0.3)
    wide_below = clipped_surrogate(new, torch.zeros(2), advantage, clip_low=0.3, clip_high=0.2)
    assert wide_above.clipped.tolist() == [False, True]
    assert wide_below.clipped.tolist() == [True, False]


def test_dual_clip_bounds_negative_advantage_loss():
    new = float64(math.log(5.0), math.log(2.0), math.log(5.0)).requires_grad_()
    out = clipped_surrogate(new, torch.zeros_like(new), float64(-1, -1, 0), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    assert out.clipped.tolist() == [True, False, False]
    torch.testing.assert_close(gradient, float64(0.0, 2.0, 0.0))
    torch.testing.assert_close(out.loss.detach()[0], float64(3.0)[0])


@pytest.mark.parametrize("advantages", [[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]])
def test_extreme_ratios_stay_finite(advantages: list[float]):
    new = torch.tensor([0.0, -1e4], requires_grad=True)
    out = clipped_surrogate(new, torch.tensor([-1e4, 0.0]), torch.tensor(advantages), clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(gradient).all()


def test_gradient_equals_numerical_derivative():
    new = float64(-0.9, -1.7, -0.3, -2.0).requires_grad_()
    old, advantage = float64(-1.0, -1.0, -1.2, -0.4), float64(0.7, -0.3, -1.1, 0.9)
    assert torch.autograd.gradcheck(
        lambda x: clipped_surrogate(x, old, advantage, clip_low=0.2, clip_high=0.3, dual_clip=2.0).loss, new
    )
