"""Replayed experts on the learner's engines, with adapters and gradient checkpointing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.trainer.config.actor_train import ActorTrainConfig, ModelArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.factory import make_engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import unmerged_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy, Sampled
from tests.families import pack, write_family
from tests.trainer.models.test_router_replay import random_experts, sequences

RATE, EPSILON = 0.1, 1.0
ENGINES = {
    "zero-0": {"zero_stage": 0},
    "zero-3": {"zero_stage": 3},
    "fsdp2": {"strategy_name": "fsdp2_train"},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


def load(folder: Path, *, disable_gradient_checkpointing: bool = True) -> PackedPolicy:
    args = ModelArgs(lora_target="q_proj,v_proj", disable_gradient_checkpointing=disable_gradient_checkpointing)
    policy = load_policy(folder, args, seed=3)
    torch.manual_seed(4)
    for parameter in policy.parameters():  # new adapters' B is 0, and A then has no gradient
        torch.nn.init.normal_(parameter, 0, 0.2)
    return policy


def micro_batches(*, has_experts: bool = True) -> list[PackedInput]:
    batches = [pack(each) for each in (sequences()[:2], sequences()[2:])]
    if not has_experts:
        return batches
    return [replace(x, routing=random_experts(len(x.tokens), seed)) for seed, x in enumerate(batches)]


def loss(number: int, output: Sampled) -> Tensor:
    return (output.logprobs * torch.linspace(-1, 2, len(output.logprobs))).sum() * (number + 1)


def adapters_after_a_step(policy: PackedPolicy) -> dict[str, Tensor]:
    """Return the factors after AdamW's first step, whose size follows the gradient's as epsilon is large."""
    for number, x in enumerate(micro_batches()):
        loss(number, policy(x)).backward()
    gradients = {id(parameter): parameter.grad for parameter in policy.parameters()}
    factors: dict[str, Tensor] = {}
    for weight in unmerged_weights(policy, "model."):
        if (gradient := gradients.get(id(weight.parts[0]))) is not None:
            factors[weight.name] = weight.tensor() - RATE * gradient / (gradient.abs() + EPSILON)
    return factors


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_replays_each_micro_batchs_experts(
    engine: str, is_checkpointed: bool, ranks: Ranks, tmp_path: Path
) -> None:
    write_family(tmp_path, "qwen3_moe")
    plain = load(tmp_path)
    with torch.no_grad():
        expected, own = ([plain(x).logprobs for x in micro_batches(has_experts=each)] for each in (True, False))
    factors = adapters_after_a_step(plain)
    settings = {"adam_epsilon": EPSILON, "max_grad_norm": 1e9}
    train = ActorTrainConfig.model_validate({"strategy_args": ENGINES[engine], "training_args": settings})
    made = make_engine(load(tmp_path, disable_gradient_checkpointing=not is_checkpointed), train, ranks)
    found: list[Tensor] = []

    def observed(number: int, output: Sampled) -> Tensor:
        found.append(output.logprobs.detach().clone())
        return loss(number, output)

    assert made.train(micro_batches(), observed, Hyperparameters(RATE, 0.0)).applied
    for logprobs, with_experts, without in zip(found, expected, own, strict=True):
        torch.testing.assert_close(logprobs, with_experts, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logprobs, without, atol=1e-3)
    trained = dict(made.tensors("adapter"))
    assert trained.keys() == factors.keys()
    for name, factor in factors.items():
        torch.testing.assert_close(trained[name], factor, rtol=1e-4, atol=1e-5, msg=name)
