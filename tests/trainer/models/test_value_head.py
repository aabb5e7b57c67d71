"""Value head on the policy: values, gradients, shared forward pass."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.value_head import ValueHead
from tests.copying import replace
from tests.trainer.models.test_policy import eager_twin, packed_batch

ATOL = 1e-5
"""Norms and rotations are float32 whatever comes."""


def policy_with_head(folder: Path, dtype: str = "float32", *, checkpoints: bool = False) -> PackedPolicy:
    args = ModelArgs.model_validate({"dtype": dtype, "disable_gradient_checkpointing": not checkpoints})
    policy = load_policy(folder, args, seed=3, value_head=True)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.nn.init.normal_(head_of(policy).weight, std=0.1)
        torch.nn.init.normal_(head_of(policy).bias)
    return policy


def head_of(policy: PackedPolicy) -> ValueHead:
    assert policy.value_head is not None
    return policy.value_head


def one_by_one(twin: torch.nn.Module, x: PackedInput, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and values, sequence by sequence with transformers' own attention."""
    logprobs, values = (torch.zeros(len(x.tokens), dtype=torch.float64) for _ in range(2))
    borders = x.packing.cu_seqlens.tolist()
    for start, end in pairwise(borders):
        output = twin(x.tokens[None, start:end], output_hidden_states=True)
        logp = torch.log_softmax(output.logits[0], dim=-1)[:-1]
        logprobs[start + 1 : end] = logp.gather(1, x.tokens[start + 1 : end, None])[:, 0]
        values[start + 1 : end] = (output.hidden_states[-1][0, :-1] * weight[0]).sum(1) + bias
    return logprobs[x.positions], values[x.positions]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_values_and_gradients_are_those_of_single_sequences_in_float64(folder: Path, checkpoints: bool) -> None:
    policy = policy_with_head(folder, checkpoints=checkpoints).double().train()
    twin, head, x = eager_twin(policy), head_of(policy), PackedInput(*packed_batch())
    weight, bias = (parameter.detach().clone().requires_grad_() for parameter in (head.weight, head.bias))
    output = policy(x)
    logprobs, values = one_by_one(twin, x, weight, bias)
    torch.testing.assert_close(output.values, values, rtol=1e-5, atol=ATOL)
    torch.testing.assert_close(output.logprobs, logprobs, rtol=0, atol=ATOL)

    u, v = torch.randn(2, len(x.positions), dtype=torch.float64)
    (u * output.logprobs + v * (output.values - 1.0) ** 2).sum().backward()
    (u * logprobs + v * (values - 1.0) ** 2).sum().backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=ATOL)
    torch.testing.assert_close(head.weight.grad, weight.grad, rtol=1e-5, atol=ATOL)
    torch.testing.assert_close(head.bias.grad, bias.grad, rtol=1e-5, atol=ATOL)


def test_value_head_shares_the_forward_pass_and_keeps_logprobs(
    folder: Path,
) -> None:
    policy, x = policy_with_head(folder), PackedInput(*packed_batch())
    plain = load_policy(folder, ModelArgs(), seed=3)(x)
    passes: list[int] = []
    policy.model.base_model.get_submodule("layers.0").register_forward_hook(lambda *_: passes.append(1))
    output = policy(x)
    assert passes == [1]
    assert torch.equal(output.logprobs, plain.logprobs)
    assert torch.equal(output.entropies, plain.entropies)
    assert plain.values is None


def test_head_alone_has_equal_values_and_no_policy_gradient(folder: Path) -> None:
    policy, x = policy_with_head(folder), PackedInput(*packed_batch())
    together, alone = policy(x), policy(replace(x, head_alone=True))
    assert torch.equal(together.values, alone.values)
    alone.values.sum().backward()
    assert {name for name, parameter in policy.named_parameters() if parameter.grad is not None} == {
        "value_head.weight",
        "value_head.bias",
    }


def test_head_is_float32_and_zero_initialized_on_a_bfloat16_policy(folder: Path) -> None:
    policy = load_policy(folder, ModelArgs(dtype="bfloat16"), seed=3, value_head=True)
    assert head_of(policy).weight.dtype == torch.float32
    output = policy(PackedInput(*packed_batch()))
    assert output.values.dtype == torch.float32
    assert not output.values.any()
