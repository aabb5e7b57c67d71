"""Values and gradients of a packed forward equal those of each sequence alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models import packing as packing_module
from offbeat.trainer.models.loading import disable_dropout, load_critic, load_policy
from offbeat.trainer.models.packing import LengthBucket, PackedInput, Packing
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.families import pack, write_family

LENGTHS = (7, 1, 12, 3, 12)
ATOL = 2e-6
"""Qwen2's norms and rotary embeddings compute in float32 whatever the weights are; the rest here is float64."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    config = TinyPolicyConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    write_tiny_policy(path, config, ["a", "b", "c", "d"])
    return path


def packed_batch() -> tuple[torch.Tensor, Packing, torch.Tensor]:
    torch.manual_seed(1)
    packing = Packing.of(torch.tensor([0, *LENGTHS]).cumsum(0))
    tokens = torch.randint(0, 11, (sum(LENGTHS),))
    positions = torch.nonzero(packing.position_ids[0] > 0)[:, 0]
    return tokens, packing, positions[torch.randperm(len(positions)) < 20]


def reference_logprobs(
    model: torch.nn.Module, tokens: torch.Tensor, packing: Packing, positions: torch.Tensor
) -> torch.Tensor:
    """Sequence by sequence, every logit, with transformers' own attention."""
    out = torch.zeros(len(tokens), dtype=torch.float64)
    for start, end in zip(packing.cu_seqlens[:-1].tolist(), packing.cu_seqlens[1:].tolist(), strict=True):
        logp = torch.log_softmax(model(tokens[None, start:end]).logits[0], dim=-1)
        out[start + 1 : end] = logp[:-1].gather(1, tokens[start + 1 : end, None])[:, 0]
    return out[positions]


def eager_twin(policy: PackedPolicy) -> torch.nn.Module:
    config = policy.model.config
    twin = AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()), attn_implementation="eager")
    twin.load_state_dict(policy.model.state_dict())
    return twin.double()


@pytest.mark.parametrize(
    ("attention", "padding"), [("auto", 8192), ("auto", 0), ("auto", 100), ("sdpa", 0), ("eager", 0)]
)
def test_packed_logprobs_and_gradients_are_those_of_single_sequences(
    folder: Path, attention: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "MAX_PADDED_PAIRS", padding)
    policy = load_policy(folder, ModelArgs(attn_implementation=attention), seed=3).double()  # pyright: ignore[reportArgumentType]
    twin = eager_twin(policy)
    tokens, packing, positions = packed_batch()
    logprobs, entropies, *_ = policy(PackedInput(tokens, packing, positions))
    expected = reference_logprobs(twin, tokens, packing, positions)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=ATOL)
    assert entropies.shape == logprobs.shape

    weights = torch.randn(len(positions), dtype=torch.float64)
    (weights * logprobs).sum().backward()
    (weights * expected).sum().backward()
    grads = dict(twin.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grads[name].grad, rtol=1e-5, atol=ATOL)


def test_sequences_of_similar_lengths_share_a_bucket() -> None:
    packing = Packing.of(torch.tensor([0, 20, 300, 20, 290, 200]).cumsum(0))
    assert packing.buckets == (LengthBucket(2, 300), LengthBucket(1, 200), LengthBucket(2, 20))
    assert packing.slots is not None
    firsts = packing.slots[packing.cu_seqlens[:-1].long()].tolist()
    assert firsts == [800, 0, 820, 300, 600]


def test_equal_lengths_are_not_copied() -> None:
    packing = Packing.of(torch.tensor([0, 5, 10, 15]))
    assert packing.slots is None
    assert packing.buckets == (LengthBucket(3, 5),)


def test_a_sequence_does_not_attend_to_its_neighbours(folder: Path) -> None:
    policy = load_policy(folder, ModelArgs(), seed=3)
    tokens, packing, positions = packed_batch()
    before, *_ = policy(PackedInput(tokens, packing, positions))
    first = int(packing.cu_seqlens[1])
    changed = tokens.clone()
    changed[first:] = (changed[first:] + 1) % 11
    after, *_ = policy(PackedInput(changed, packing, positions))
    own = positions < first
    assert torch.equal(before[own], after[own])
    assert not torch.allclose(before[~own], after[~own])


@pytest.mark.parametrize("padding", [0, 8192])
def test_a_sliding_window_bounds_packed_attention(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "MAX_PADDED_PAIRS", padding)
    config = Qwen2Config(
        vocab_size=11, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=0, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="offbeat_packed")
    policy = PackedPolicy(model).double()
    tokens, packing, positions = packed_batch()
    logprobs, *_ = policy(PackedInput(tokens, packing, positions))
    expected = reference_logprobs(eager_twin(policy), tokens, packing, positions)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=ATOL)


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    grads: list[list[torch.Tensor]] = []
    for disable in (True, False):
        policy = load_policy(folder, ModelArgs(disable_gradient_checkpointing=disable), seed=3).double().train()
        logprobs, entropies, *_ = policy(PackedInput(*packed_batch()))
        (logprobs.sum() + entropies.sum()).backward()
        grads.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1])
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=0, atol=1e-12)


def test_temperature_divides_the_logits(folder: Path) -> None:
    x = PackedInput(*packed_batch())
    hot = load_policy(folder, ModelArgs(), seed=3, temperature=2.0)(x)
    halved = load_policy(folder, ModelArgs(), seed=3)
    halved.model.model.norm.weight.data /= 2.0  # halves every logit
    torch.testing.assert_close(hot, halved(x))


def test_an_untrained_critic_returns_zero(folder: Path) -> None:
    critic = load_critic(folder, ModelArgs(), seed=3)
    tokens, packing, positions = packed_batch()
    values = critic(PackedInput(tokens, packing, positions))
    assert values.shape == positions.shape
    assert not values.any()
    values.sum().backward()
    assert critic.value_head.weight.grad is not None
    assert critic.value_head.weight.grad.any()


def test_initial_weights_depend_on_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(99)
    one = load_policy(folder, ModelArgs(), seed=3).state_dict()
    torch.rand(5)
    two = load_policy(folder, ModelArgs(), seed=3).state_dict()
    other = load_policy(folder, ModelArgs(), seed=4).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.model.embed_tokens.weight"], other["model.model.embed_tokens.weight"])


@pytest.mark.parametrize("borders", [[0], [1, 3], [0, 3, 3], [0, 4, 2]])
def test_borders_that_do_not_grow_from_zero_are_refused(borders: list[int]) -> None:
    with pytest.raises(ValueError, match="borders"):
        Packing.of(torch.tensor(borders))


def test_scoring_a_sequences_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        PackedInput.of(torch.arange(5), torch.tensor([0, 3, 5]), torch.tensor([1, 3]))


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_training_mode_has_no_dropout(tmp_path: Path, folder: Path, attention: str) -> None:
    """The engine samples without dropout; with it, logprobs differed by up to 4.9 nats."""
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    policy = load_policy(tmp_path / "model", ModelArgs(attn_implementation=attention), seed=3)  # pyright: ignore[reportArgumentType]
    x = PackedInput(*packed_batch())
    assert torch.equal(policy.train()(x)[0], policy.eval()(x)[0])
    assert policy.model.config.attention_dropout == 0.5  # written to checkpoints as it was


def test_dropout_layers_are_disabled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Dropout1d(0.3))
    disable_dropout(model)
    x = torch.randn(3, 4)
    assert torch.equal(model.train()(x), model.eval()(x))


def test_routers_add_no_noise(tmp_path: Path) -> None:
    """The engine's choose experts without."""
    write_family(tmp_path, "mixtral", router_jitter_noise=0.5)
    policy = load_policy(tmp_path, ModelArgs(), seed=3)
    x = pack([torch.arange(3, 60)])
    assert torch.equal(policy.train()(x)[0], policy.eval()(x)[0])
