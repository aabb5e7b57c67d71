"""Every policy loss against a plain loop in float64 that looks at one token at a time, its gradient by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.trainer.algorithms.aipo import one_sided_policy_gradient
from offbeat.trainer.algorithms.cispo import clipped_weight_policy_gradient
from offbeat.trainer.algorithms.dppo import divergence_masked_surrogate
from offbeat.trainer.algorithms.kimi15 import mirror_descent
from offbeat.trainer.algorithms.ppo import clipped_surrogate
from offbeat.trainer.algorithms.ratio import TokenLosses, token_ratio, unit_ratio
from offbeat.trainer.algorithms.sapo import soft_gated_surrogate
from offbeat.trainer.algorithms.tis import truncated_importance_sampling
from offbeat.trainer.algorithms.topr import tapered_policy_gradient
from offbeat.trainer.algorithms.vanilla import policy_gradient

logprob = st.floats(-6, -0.01)
rows_of = st.lists(st.tuples(logprob, logprob, st.floats(-2, 2)), min_size=1, max_size=10)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


Loss = Callable[[Tensor, Tensor, Tensor], TokenLosses]
"""(log pi, log pi_old, advantages)"""
ByHand = Callable[[float, float, float], tuple[float, float, bool]]
"""The same of one token -> loss, gradient with respect to log pi, clipped."""


def sapo_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    r, t = math.exp(n - o), 1.0 if a > 0 else 1.3
    s = 1 / (1 + math.exp(-t * (r - 1)))
    return -a * 4 / t * s, -a * 4 * s * (1 - s) * r, False


def dppo_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    moved, r = math.exp(n) - math.exp(o), math.exp(n - o)
    gone = (a > 0 and moved > 0.2) or (a < 0 and moved < -0.1)
    weight = 0.0 if gone else 1.0
    return -weight * a * r + 0.01 * (n - o) ** 2, -weight * a * r + 0.02 * (n - o), gone


def weighted(weight: float, n: float, a: float, clipped: bool) -> tuple[float, float, bool]:
    return -weight * a * n, -weight * a, clipped


def vanilla_by_hand(n: float, _: float, a: float) -> tuple[float, float, bool]:
    return weighted(1.0, n, a, False)


def cispo_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    r = math.exp(n - o)
    return weighted(clip(r, 0.7, 1.5), n, a, r < 0.7 or r > 1.5)


def masked_cispo_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    r = math.exp(n - o)
    gone = (a > 0 and r > 1.5) or (a < 0 and r < 0.7)
    return weighted(0.0 if gone else clip(r, 0.7, 1.5), n, a, gone)


def topr_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    r = math.exp(n - o)
    return weighted(0.5, n, a, False) if a > 0 else weighted(2.0 * min(r, 1.0), n, a, r > 1)


def tis_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    r = math.exp(n - o)
    return weighted(clip(r, 0.3, 1.4), n, a, not 0.3 <= r <= 1.4)


def aipo_by_hand(n: float, o: float, a: float) -> tuple[float, float, bool]:
    r = math.exp(n - o)
    return weighted(min(r, 3.0), n, a, r > 3.0)


LOSSES: dict[str, tuple[Loss, ByHand]] = {
    "vanilla": (lambda n, o, a: policy_gradient(token_ratio(n, o), n, a), vanilla_by_hand),
    "tis": (
        lambda n, o, a: truncated_importance_sampling(token_ratio(n, o), n, a, lower_bound=0.3, upper_bound=1.4),
        tis_by_hand,
    ),
    "cispo": (
        lambda n, o, a: clipped_weight_policy_gradient(token_ratio(n, o), n, a, epsilon_low=0.3, epsilon_high=0.5),
        cispo_by_hand,
    ),
    "cispo, masked": (
        lambda n, o, a: clipped_weight_policy_gradient(
            token_ratio(n, o), n, a, epsilon_low=0.3, epsilon_high=0.5, unified_mask=True
        ),
        masked_cispo_by_hand,
    ),
    "topr": (
        lambda n, o, a: tapered_policy_gradient(token_ratio(n, o), n, a, positive_weight=0.5, negative_weight=2.0),
        topr_by_hand,
    ),
    "kimi15": (
        lambda n, o, a: mirror_descent(token_ratio(n, o), n, o, a, tau=0.4),
        lambda n, o, a: (-a * n + 0.2 * (n - o) ** 2, -a + 0.4 * (n - o), False),
    ),
    "aipo": (lambda n, o, a: one_sided_policy_gradient(n, o, a, rho=3.0), aipo_by_hand),
    "dppo_tv": (
        lambda n, o, a: divergence_masked_surrogate(n, o, a, mask_low=0.1, mask_high=0.2, kl_tau=0.01),
        dppo_by_hand,
    ),
    "sapo": (
        lambda n, o, a: soft_gated_surrogate(token_ratio(n, o), a, temperature_pos=1.0, temperature_neg=1.3),
        sapo_by_hand,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25)
@given(rows=rows_of)
def test_loss_and_gradient_equal_the_formula(name: str, rows: list[tuple[float, float, float]]):
    loss, by_hand = LOSSES[name]
    new, old, advantages = torch.tensor(rows, dtype=torch.float64).T
    new = new.clone().requires_grad_()
    out = loss(new, old, advantages)
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    expected = [by_hand(*row) for row in rows]
    torch.testing.assert_close(out.loss.detach(), torch.tensor([e[0] for e in expected], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([e[1] for e in expected], dtype=torch.float64))
    assert out.clipped.tolist() == [e[2] for e in expected]
    torch.testing.assert_close(out.ratio, torch.tensor([math.exp(n - o) for n, o, _ in rows], dtype=torch.float64))


@pytest.mark.parametrize("name", [*LOSSES, "ppo"])
def test_gradient_at_ratio_one_equals_reinforce(name: str):
    ppo: Loss = lambda n, o, a: clipped_surrogate(token_ratio(n, o), a, clip_low=0.2, clip_high=0.2)  # noqa: E731
    loss = ppo if name == "ppo" else LOSSES[name][0]
    new = torch.tensor([-0.5, -1.5, -2.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.7, -0.3, 0.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(loss(new, new.detach(), advantages).loss.sum(), new)
    weight = torch.tensor([0.5, 2.0, 2.0]) if name == "topr" else torch.ones(3)
    torch.testing.assert_close(gradient, -advantages * weight)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_and_empty_inputs_stay_finite(name: str):
    loss, _ = LOSSES[name]
    for advantages in ([-1.0, 1.0], [1.0, -1.0]):
        new = torch.tensor([0.0, -1e4], requires_grad=True)
        out = loss(new, torch.tensor([-1e4, 0.0]), torch.tensor(advantages))
        assert torch.isfinite(out.loss).all()
        assert torch.isfinite(torch.autograd.grad(out.loss.sum(), new)[0]).all()
    nothing = torch.zeros(0, requires_grad=True)
    assert loss(nothing, nothing.detach(), nothing.detach()).loss.shape == (0,)


units_of = st.lists(st.tuples(st.integers(0, 3), logprob, logprob), min_size=1, max_size=10)


@settings(max_examples=30)
@given(units_of)
def test_unit_ratio_aggregates_its_tokens(rows: list[tuple[int, float, float]]):
    unit = torch.tensor([u for u, _, _ in rows])
    new = torch.tensor([n for _, n, _ in rows], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([o for _, _, o in rows], dtype=torch.float64)
    other = torch.arange(len(rows))
    for name, args in {"turn": (unit, other), "sequence": (other, unit), "sequence-token": (other, unit)}.items():
        got = unit_ratio(name, new, old, *args)
        (gradient,) = torch.autograd.grad(got.sum(), new)
        for i, (u, _, _) in enumerate(rows):
            gaps = [n - o for v, n, o in rows if v == u]
            mean = math.exp(sum(gaps) / len(gaps))
            assert float(got[i].detach()) == pytest.approx(mean, rel=1e-9)
            # Of the unit's mean, each of n tokens has 1/n of the gradient, n times; of GSPO-token's, its own
            assert float(gradient[i]) == pytest.approx(mean, rel=1e-9)
    ratio = unit_ratio("sequence-product", new, old, other, unit)
    for i, (u, _, _) in enumerate(rows):
        total = sum(n - o for v, n, o in rows if v == u)
        assert float(ratio[i].detach()) == pytest.approx(math.exp(min(max(total, -20), 20)), rel=1e-9)


def test_gspo_token_gradient_is_per_token():
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, one = torch.tensor([-1.5, -1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    token = unit_ratio("sequence-token", new, old, one, one)
    (gradient,) = torch.autograd.grad(token[0], new)
    assert gradient.tolist() == pytest.approx([math.exp(-0.25), 0.0])
    (gradient,) = torch.autograd.grad(unit_ratio("sequence", new, old, one, one)[0], new)
    assert gradient.tolist() == pytest.approx([math.exp(-0.25) / 2] * 2)
