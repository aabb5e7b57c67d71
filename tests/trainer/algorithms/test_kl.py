import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.kl import (
    KL_PENALTIES,
    KLController,
    k2,
    k3,
)

P = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("name", ["kl", "k3"])
def test_mean_of_unbiased_estimators_is_exact_kl(name: str):
    exact = float((P * (P / Q).log()).sum())
    assert float((P * KL_PENALTIES[name](P.log(), Q.log())).sum()) == pytest.approx(exact, rel=1e-12)


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_penalties_equal_their_formulas(p: float, q: float):
    got = {
        name: float(penalty(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)))
        for name, penalty in KL_PENALTIES.items()
    }
    d = p - q
    k3_by_hand = torch.tensor(-d, dtype=torch.float64).exp().item() + d - 1
    assert got == pytest.approx({"kl": d, "k2": d * d / 2, "k3": k3_by_hand, "abs": abs(d)}, rel=1e-9, abs=1e-9)
    assert got["k3"] >= 0


def test_mean_gradient_of_k2_is_that_of_the_kl():
    logits = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - Q.log())).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (got,) = torch.autograd.grad((logprobs.detach().exp() * k2(logprobs, Q.log())).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_k3_pulls_towards_the_reference_with_zero_gradient_there():
    logprobs = torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.5, -1.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(k3(logprobs, reference).sum(), logprobs)
    assert gradient.sign().tolist() == [1, -1, 0]


def test_extreme_ratios_stay_finite():
    for penalty in KL_PENALTIES.values():
        assert torch.isfinite(penalty(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))).all()


@pytest.mark.parametrize("gap", [-60.0, -25.0, 25.0, 60.0])
def test_k3_has_a_gradient_however_far_the_policies_are(gap: float):
    logprobs = torch.tensor([gap], requires_grad=True)
    (gradient,) = torch.autograd.grad(k3(logprobs, torch.zeros(1)).sum(), logprobs)
    assert gradient.sign().item() == (1 if gap > 0 else -1)
    assert torch.isfinite(gradient).all()


def test_adaptive_controller_moves_towards_target_within_bounds():
    controller = KLController(0.1, target=1.0, horizon=1000)
    controller.update(kl=1.1, num_samples=100)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.update(kl=10.0, num_samples=100)
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(kl=0.0, num_samples=100)
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


@pytest.mark.parametrize("horizon", [1, 10, 100])
def test_a_horizon_below_a_batch_keeps_the_coefficient_positive(horizon: int):
    controller = KLController(0.2, target=0.1, horizon=horizon)
    for _ in range(3):
        controller.update(kl=0.0, num_samples=512)
    assert controller.coef == pytest.approx(0.2 * 0.8**3)


def test_adaptive_controller_resumes_from_checkpoint():
    controller = KLController(0.1, target=1.0, horizon=1000)
    controller.update(kl=3.0, num_samples=50)
    restored = KLController(0.1, target=1.0, horizon=1000)
    restored.resume(controller.coef)
    for instance in (controller, restored):
        instance.update(kl=0.5, num_samples=50)
    assert restored.coef == controller.coef != 0.1


@pytest.mark.parametrize("stored_coef", [0.0, float("nan")])
def test_resume_ignores_coefficient_of_run_without_penalty(stored_coef: float):
    controller = KLController(0.1, target=1.0)
    controller.resume(stored_coef)
    assert controller.coef == 0.1


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_kl_keeps_the_coefficient(kl: float):
    controller = KLController(0.1, target=1.0, horizon=10)
    controller.update(kl, num_samples=10)
    assert controller.coef == 0.1


def test_fixed_controller_keeps_its_coefficient():
    controller = KLController(0.1)
    controller.update(kl=10.0, num_samples=100)
    assert controller.coef == 0.1
    controller.resume(0.7)
    assert controller.coef == 0.1  # the configuration's, though a checkpoint was written with another
