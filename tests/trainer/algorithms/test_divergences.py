"""Divergences against plain loops in float64, with gradients, and against TRL."""

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offbeat.trainer.algorithms.divergences import DIVERGENCES, DivergenceTerms

TERMS = DivergenceTerms(js_beta=0.3, adaptive_alpha=0.6, skew_lambda=0.2)
Row = list[float]


def kl(p: Row, q: Row) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def mixed(p: Row, q: Row, share: float) -> Row:
    return [share * a + (1 - share) * b for a, b in zip(p, q, strict=True)]


def adaptive(p: Row, q: Row, share: float | None = None) -> float:
    weight = head_share(p, q) if share is None else share
    return weight * kl(p, q) + (1 - weight) * kl(q, p)


def head_share(p: Row, q: Row) -> float:
    total, head, tail = 0.0, 0.0, 0.0
    for a, b in sorted(zip(p, q, strict=True)):
        total += a
        if total < 0.6:
            tail += abs(a - b)
        else:
            head += abs(a - b)
    return head / (head + tail)


FORMULAS: dict[str, Callable[[Row, Row], float]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "js_divergence": lambda p, q: 0.3 * kl(p, mixed(p, q, 0.3)) + 0.7 * kl(q, mixed(p, q, 0.3)),
    "adaptive_kl": adaptive,
    "skewed_forward_kl": lambda p, q: kl(p, mixed(p, q, 0.2)),
    "skewed_reverse_kl": lambda p, q: kl(q, mixed(p, q, 0.8)),
}


def random_logits(seed: int, rows: int = 3, width: int = 6) -> Tensor:
    return 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_divergence_and_its_gradient_equal_a_plain_loop(name: str):
    teacher, logits = random_logits(1).log_softmax(1), random_logits(2).requires_grad_()
    values = DIVERGENCES[name](teacher, logits.log_softmax(1), TERMS)
    values.sum().backward()
    formula, ps = FORMULAS[name], teacher.exp().tolist()
    for value, p, q in zip(values.tolist(), ps, logits.softmax(1).tolist(), strict=True):
        assert value == pytest.approx(formula(p, q), rel=1e-10)
    assert logits.grad is not None
    for i in range(3):
        q = logits.detach()[i].softmax(0).tolist()
        share = head_share(ps[i], q)  # a constant

        def at(moved: Tensor, i: int = i, share: float = share) -> float:
            p, q = ps[i], moved.softmax(0).tolist()
            return adaptive(p, q, share) if name == "adaptive_kl" else formula(p, q)

        for j in range(6):
            step = 1e-6 * torch.eye(6, dtype=torch.float64)[j]
            row = logits.detach()[i]
            slope = (at(row + step) - at(row - step)) / 2e-6
            assert float(logits.grad[i, j]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", FORMULAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(name: str):
    logits = random_logits(1).requires_grad_()
    values = DIVERGENCES[name](logits.detach().log_softmax(1), logits.log_softmax(1), TERMS)
    values.sum().backward()
    assert logits.grad is not None
    assert torch.allclose(values, torch.zeros(3, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(logits.grad, torch.zeros_like(logits.grad), atol=1e-14)


@pytest.mark.parametrize("name", FORMULAS)
def test_outcomes_without_probability_give_finite_values_and_gradients(name: str):
    teacher = torch.tensor([[0.0, -1e4, -1e4]])
    logits = torch.tensor([[0.0, -1e4, 1.0]], requires_grad=True)
    values = DIVERGENCES[name](teacher, logits.log_softmax(1).clamp(min=-1e4), TERMS)
    values.sum().backward()
    assert logits.grad is not None
    assert bool(values.isfinite().all())
    assert bool(logits.grad.isfinite().all())


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: it is part of the dev extra")
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:`torch.jit", "ignore:You are importing from")
@pytest.mark.parametrize(("beta", "name"), [(0.0, "forward_kl"), (0.3, "js_divergence"), (1.0, "reverse_kl")])
def test_losses_and_gradients_equal_trls_gkd(beta: float, name: str):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    teacher, logits = random_logits(1), random_logits(2).requires_grad_()
    labels = torch.tensor([[5, -100, 7]])
    expected = GKDTrainer.generalized_jsd_loss(logits[None], teacher[None], labels, beta=beta, temperature=1.7)
    (of_trl,) = torch.autograd.grad(expected, logits)
    student = (logits / 1.7).log_softmax(1)
    values = DIVERGENCES[name]((teacher / 1.7).log_softmax(1), student, DivergenceTerms(js_beta=beta))
    loss = values[labels[0] != -100].mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, of_trl)
