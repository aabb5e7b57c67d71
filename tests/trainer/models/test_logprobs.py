"""Log-probabilities and entropies against torch's own, values and gradients."""

import pytest
import torch

from offbeat.trainer.models import logprobs
from offbeat.trainer.models.logprobs import token_logprobs


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits / temperature, dim=1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1 << 24, 14])
def test_values_and_gradients_are_those_of_log_softmax(
    temperature: float, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CPU_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (3 * torch.randn(9, 7, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 7, (9,))
    weights = torch.randn(2, 9, dtype=torch.float64)
    grads: list[torch.Tensor] = []
    outputs = [token_logprobs(logits, targets, temperature), reference(logits, targets, temperature)]
    for logp, entropy in outputs:
        (grad,) = torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), logits)
        grads.append(grad)
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-12)


def test_the_hand_written_gradient_is_the_numerical_one() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.8), (logits,))


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = torch.randn(6, 50, dtype=torch.bfloat16, requires_grad=True)
    logp, entropy = token_logprobs(logits, torch.arange(6))
    assert logp.dtype == entropy.dtype == torch.float32
    expected, _ = reference(logits.detach().float(), torch.arange(6), 1.0)
    torch.testing.assert_close(logp.detach(), expected, rtol=0, atol=1e-6)
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_token_with_logit_minus_infinity_has_no_effect(masked: float) -> None:
    plain = torch.randn(4, 5).requires_grad_()
    logits = torch.cat([plain.detach(), torch.full((4, 2), masked)], 1).requires_grad_()
    targets = torch.tensor([0, 4, 2, 2])
    for values, temperature in ((plain, 0.5), (logits, 0.5)):
        logp, entropy = token_logprobs(values, targets, temperature)
        (logp.sum() + 3.0 * entropy.sum()).backward()
    assert plain.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, :5], plain.grad)
    assert torch.equal(logits.grad[:, 5:], torch.zeros(4, 2))


@pytest.mark.parametrize("which", [0, 1])
def test_logprobs_and_entropies_have_separate_gradients(which: int) -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 2])
    got, expected = (
        torch.autograd.grad(function(logits, targets, 0.8)[which].sum(), logits)[0]
        for function in (token_logprobs, reference)
    )
    torch.testing.assert_close(got, expected)
