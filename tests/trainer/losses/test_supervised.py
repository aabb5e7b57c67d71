"""Supervised loss: a mean over the step's learned tokens, whatever the split; the warm start's and the pipeline's."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from offbeat.services.telemetry import merge_all
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.prefix_trees import whole_group_microbatches
from offbeat.trainer.losses.supervised import SupervisedLosses
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.training.optimizer_step import to_input
from tests.trainer.trajectories import group, trajectory


@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_loss_and_gradient_equal_a_plain_loop_in_float64(max_tokens: int, tmp_path: Path):
    write_tiny_policy(
        tmp_path, TinyPolicyConfig(hidden_size=32, num_attention_heads=1, num_key_value_heads=1), ("a",) * 1
    )
    policy = load_policy(tmp_path, ModelArgs(), 0, 1.0).double()
    batch = pack([_within(policy.model.config.vocab_size)[n] for n in range(4)])
    micro = whole_group_microbatches(batch, range(batch.num_sequences), max_tokens, share_prefix=False)
    losses = SupervisedLosses(batch.num_sampled)
    for i, part in enumerate(micro):
        losses.of_policy(i, policy(to_input(part))).backward()
    packed = policy.model.get_input_embeddings().weight.grad
    plain = plain_model(policy)

    total, count = torch.zeros((), dtype=torch.float64), 0
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens = batch.tokens[start:end]
        logits = plain(tokens[None], use_cache=False).logits[0]
        for position in (batch.positions[(batch.positions >= start) & (batch.positions < end)] - start).tolist():
            total = total - torch.log_softmax(logits[position - 1], -1)[tokens[position]]
            count += 1
    (total / count).backward()
    assert count == batch.num_sampled
    assert merge_all(losses.gauges)["loss"].value == pytest.approx(float(total.detach() / count), rel=1e-5)
    assert torch.allclose(packed, plain.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-7)


def plain_model(policy: PackedPolicy) -> PreTrainedModel:
    """The same weights with transformers' own attention."""
    config = copy.deepcopy(policy.model.config)
    config._attn_implementation = "eager"
    model = type(policy.model)(config)
    model.load_state_dict(policy.model.state_dict())
    return model.double()


def _within(vocab_size: int):
    """The groups with token ids of the vocabulary."""
    return [
        group(n, trajectory(0, [(1, 1 + n % 2, 0.0), (1, 1, 0.0)], base=n % max(1, vocab_size - 6))) for n in range(4)
    ]
