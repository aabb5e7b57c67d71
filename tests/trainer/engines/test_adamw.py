"""AdamW with moments of 8 bits, against the one of 32."""

import math

import pytest
import torch
from torch import nn

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.adamw import make_adamw
from offbeat.trainer.engines.param_groups import forget


def test_moments_of_8_bits_take_a_quarter_and_follow_adamw() -> None:
    """Both optimizers minimize the same quadratic of a wide matrix."""
    torch.manual_seed(0)
    wanted, first = torch.randn(128, 64), torch.randn(128, 64)
    held, left = {}, {}
    for name in ("adamw_torch", "adamw_8bit"):
        weight = nn.Parameter(first.clone())
        training = TrainingArgs(learning_rate=0.05, optim=name)
        optimizer = make_adamw([[weight]], training, clips=True)
        for _ in range(60):
            optimizer.zero_grad()
            (0.5 * (weight - wanted).square().sum()).backward()
            optimizer.step()
        moments = [each for key, each in optimizer.state[weight].items() if key not in ("step", "qmap1", "qmap2")]
        held[name], left[name] = sum(each.nbytes for each in moments), float((weight - wanted).detach().norm())
    assert held["adamw_8bit"] / held["adamw_torch"] == pytest.approx(0.25, abs=0.01)
    assert left["adamw_8bit"] == pytest.approx(left["adamw_torch"], rel=0.1)
    assert left["adamw_8bit"] < 0.5 * float((first - wanted).norm())


@pytest.mark.parametrize("shape", [(4, 4), (128, 64)], ids=["of 32 bits", "of 8 bits"])
def test_forgotten_moments_of_8_bits_are_those_of_a_new_optimizer(shape: tuple[int, int]) -> None:
    """bitsandbytes keeps those of small weights in 32 bits."""
    torch.manual_seed(0)
    first, grads, weights = torch.randn(shape), torch.randn(4, *shape), []
    for is_new in (True, False):
        weight = nn.Parameter(first.clone())
        optimizer = make_adamw([[weight]], TrainingArgs(learning_rate=0.1, optim="adamw_8bit"), clips=False)
        if not is_new:
            for grad in grads[:2]:
                weight.grad = 10 * grad
                optimizer.step()
            weight.data.copy_(first)
            forget(optimizer.state.values())
        for grad in grads[2:]:
            weight.grad = grad.clone()
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], first)


def test_a_step_of_8_bits_is_clipped_and_skips_gradients_that_are_not_finite() -> None:
    weight = nn.Parameter(torch.zeros(128, 64))
    optimizer = make_adamw([[weight]], TrainingArgs(learning_rate=0.1, optim="adamw_8bit"), clips=True)
    weight.grad = torch.full_like(weight, math.inf)
    optimizer.step()
    assert not weight.any()
    weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()
    assert float(weight.grad.norm()) == pytest.approx(1.0, rel=1e-3)
    assert weight.detach().all()
