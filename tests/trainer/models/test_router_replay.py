"""Replayed experts against a plain computation with given experts, by family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.router_replay import REPLAYED_FAMILIES
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from tests.families import pack, write_family

LAYERS, TOP_K, EXPERTS = 2, 2, 4
SIGMOID = ("deepseek_v3", "glm4_moe")
LENGTHS = (9, 5, 12)


def load(folder: Path, kind: str, **arguments: Any) -> PackedPolicy:
    changes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K} if kind in ("olmoe", "flex_olmo") else {}
    write_family(folder, kind, **changes)
    policy = load_policy(folder, ModelArgs(**arguments), seed=3)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    policy.model.set_experts_implementation("eager")  # the grouped product takes no float64
    policy.model.double()
    return policy


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]


def random_experts(num_tokens: int, seed: int = 7) -> Tensor:
    """Distinct experts of each token and layer, [N, layers, top_k] int16."""
    scores = torch.rand(num_tokens, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(TOP_K).indices.to(torch.int16)


def routers(policy: PackedPolicy) -> list[tuple[int, nn.Module]]:
    named = policy.model.named_modules()
    return [
        (int(name.split("layers.")[1].split(".")[0]), module)
        for name, module in named
        if type(module).__name__.lower().endswith("topkrouter")
    ]


def given_weights(router: Any, kind: str, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the family's paper says of a router whose choice is given."""
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    scores = logits.float().sigmoid() if kind in SIGMOID else logits.float().softmax(-1)
    weights = torch.stack([scores[row, chosen] for row, chosen in enumerate(experts)])
    if kind in ("mixtral", "qwen3_5_moe_text") or getattr(router, "norm_topk_prob", False):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, (weights * getattr(router, "routed_scaling_factor", 1.0)).to(hidden.dtype), experts


def loss_and_gradients(policy: PackedPolicy, x: PackedInput) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    logprobs = policy(x)[0]
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


def with_experts(x: PackedInput, experts: Tensor | None) -> PackedInput:
    return replace(x, routing=experts)


@pytest.mark.parametrize("kind", REPLAYED_FAMILIES)
def test_gradients_are_those_of_a_plain_router_with_given_experts(kind: str, tmp_path: Path) -> None:
    policy = load(tmp_path, kind)
    x = pack(sequences())
    experts = random_experts(len(x.tokens))
    logprobs, gradients = loss_and_gradients(policy, with_experts(x, experts))
    own, _ = loss_and_gradients(policy, x)
    assert not torch.allclose(own, logprobs, atol=1e-3)
    found = routers(policy)
    for layer, router in found:
        chosen = experts[:, layer].long()
        router.forward = lambda hidden, router=router, chosen=chosen: given_weights(router, kind, hidden, chosen)
    expected, expected_gradients = loss_and_gradients(policy, x)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert all(router.weight.grad.abs().max() > 0 for _, router in found)  # type: ignore[union-attr, operator]


def test_unknown_tokens_are_routed_by_the_learner(tmp_path: Path) -> None:
    policy = load(tmp_path, "qwen3_moe")
    x = pack(sequences())
    own = policy(x)[0]
    unknown = torch.full((len(x.tokens), LAYERS, TOP_K), -1, dtype=torch.int16)
    torch.testing.assert_close(policy(with_experts(x, unknown))[0], own, rtol=0, atol=0)
    given = unknown.clone()
    given[: LENGTHS[0]] = random_experts(LENGTHS[0])
    mixed = policy(with_experts(x, given))[0]
    first = LENGTHS[0] - 1
    torch.testing.assert_close(mixed[first:], own[first:], rtol=1e-9, atol=1e-12)
    assert (mixed[:first] - own[:first]).abs().max() > 1e-3
    torch.testing.assert_close(policy(x)[0], own, rtol=0, atol=0)  # the next pass has forgotten them


def test_experts_that_the_router_chose_itself_change_nothing(tmp_path: Path) -> None:
    policy = load(tmp_path, "deepseek_v3")
    x = pack(sequences())
    chosen: dict[int, Tensor] = {}

    def remember(layer: int) -> Any:
        return lambda _module, _inputs, outputs: chosen.update({layer: outputs[2]})

    hooks = [router.register_forward_hook(remember(layer)) for layer, router in routers(policy)]
    own, gradients = loss_and_gradients(policy, x)
    for hook in hooks:
        hook.remove()
    experts = torch.zeros(len(x.tokens), LAYERS, TOP_K, dtype=torch.int16)  # layer 0 has no experts
    for layer, indices in chosen.items():
        experts[:, layer] = indices.to(torch.int16)
    logprobs, replayed = loss_and_gradients(policy, with_experts(x, experts))
    assert list(chosen) == [1]
    torch.testing.assert_close(logprobs, own, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(replayed[name], gradient, rtol=1e-9, atol=1e-12)


def test_gradient_checkpointing_replays_the_same_experts(tmp_path: Path) -> None:
    x = pack(sequences())
    experts = random_experts(len(x.tokens))
    results = []
    for disabled in (True, False):
        torch.manual_seed(0)
        policy = load(tmp_path, "qwen3_moe", disable_gradient_checkpointing=disabled).train()
        results.append(loss_and_gradients(policy, with_experts(x, experts)))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient)


def test_a_family_that_can_not_be_told_is_refused_by_name(tmp_path: Path) -> None:
    policy = load(tmp_path, "qwen3")
    x = pack(sequences())
    with pytest.raises(ValueError, match="router_replay is not supported for qwen3, only for deepseek_v3"):
        policy(with_experts(x, random_experts(len(x.tokens))))


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    policy = load(tmp_path, "qwen3_moe")
    x = pack(sequences())
    with pytest.raises(ValueError, match=r"of shape \[2, 1\], the model's \[layers, top_k\] is \[2, 2\]"):
        policy(with_experts(x, random_experts(len(x.tokens))[..., :1]))
