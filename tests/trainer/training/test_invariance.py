"""What must not matter does not: how a batch is cut, packed and padded, and the order in which its episodes come."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.services.messages.types import Trajectory
from offbeat.services.telemetry import merge_all
from offbeat.trainer.algorithms.normalization import has_signal
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter, TrainInferCorrection
from offbeat.trainer.config.rewards import RewardNormalization
from offbeat.trainer.data.batch import microbatches, minibatches, pack
from offbeat.trainer.data.selection import carries_signal
from offbeat.trainer.losses.policy_loss import critic_loss, policy_loss
from offbeat.trainer.losses.targets import build_targets
from tests.copying import replace
from tests.trainer.outcome import (
    by_token,
    inputs_of,
    outcome,
    rich_groups,
)

WEIGHTED = TrainInferCorrection(
    is_weight=ImportanceWeight(weight_type="turn", upper_bound=1.2),
    filters=(MismatchFilter(agg_type="geometric", ratio_low=0.8, ratio_high=1.3), MismatchFilter(diff_high=0.1)),
    m2_threshold=0.03,
)
WHOLE = TrainInferCorrection(filters=(MismatchFilter(agg_type="sequence", ratio_low=0.5, ratio_high=2.0),))
CONFIGS: dict[str, dict[str, Any]] = {
    "dapo": {"zero_variance": "train", "pg_clip_high": 0.28, "max_len_mask": True},
    "dr_grpo": {"adv_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_agg_length": 32},
    "gspo": {"ratio_type": "sequence", "pg_clip": 0.05, "loss_agg_mode": "seq-mean-token-mean"},
    "gspo-token": {"ratio_type": "sequence-token", "pg_clip": 0.05, "loss_agg_mode": "seq-mean-token-mean"},
    "turn ratio": {"ratio_type": "turn", "dual_clip": 2.0, "loss_agg_mode": "seq-mean-token-sum"},
    "rloo": {"adv_estimator": "rloo", "ratio_type": "sequence-product", "loss_agg_mode": "seq-mean-token-mean"},
    "reinforce++": {"adv_estimator": "reinforce_plus_plus", "add_token_level_kl": True, "init_kl_coef": 0.1},
    "whole kl in the reward": {
        "adv_estimator": "reinforce_plus_plus",
        "add_token_level_kl": True,
        "init_kl_coef": 0.1,
        "kl_penalty": "full",
        "old_logprobs": "recompute",
    },
    "reinforce++ baseline": {"adv_estimator": "reinforce_plus_plus_baseline", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "lite ppo": {"reward_normalization": RewardNormalization(norm_mean_type="group", norm_std_type="batch")},
    "running": {"reward_normalization": RewardNormalization(norm_mean_type="running", norm_std_type="running")},
    "opo": {"adv_estimator": "opo", "whiten_rewards": True},
    "maxrl": {"adv_estimator": "maxrl", "pg_variant": "vanilla"},
    "gigpo": {"adv_estimator": "gigpo", "zero_variance": "train"},
    "step_reinforce": {
        "adv_estimator": "step_reinforce",
        "reward_normalization": RewardNormalization(method="mean_std"),
    },
    "agentic_reinforce": {"adv_estimator": "agentic_reinforce", "gamma": 0.9, "whiten_advantages": True},
    "gae of turns": {"adv_estimator": "gae", "gae_level": "turn", "value_clip": 0.1},
    "vtrace": {"adv_estimator": "gae", "old_logprobs": "recompute", "value_targets": "vtrace"},
    "corrected": {"old_logprobs": "recompute", "train_infer_correction": WEIGHTED},
    "log-linear": {"old_logprobs": "loglinear", "train_infer_correction": WHOLE},
    "rejected": {"train_infer_correction": WHOLE},
    "gpg": {"pg_variant": "gpg", "zero_variance": "train"},
    "topr": {"pg_variant": "topr", "ratio_type": "sequence-product"},
    "cispo": {"pg_variant": "cispo", "cispo_epsilon_high": 0.2, "difficulty_loss_weight": True},
    "kimi15": {"pg_variant": "kimi15", "length_loss_weight": True},
    "aipo": {"pg_variant": "aipo"},
    "dppo_tv": {"pg_variant": "dppo_tv", "dppo_mask_high": 0.02},
    "sapo": {"pg_variant": "sapo", "ratio_type": "turn"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_the_same_however_the_batch_is_cut(name: str):
    config = AlgorithmConfig(**CONFIGS[name], entropy_loss_coef=0.1)
    whole = outcome(config)
    batch, gauges = whole.batch, []
    logprobs = (batch.behavior_logprobs + by_token(batch, 0.4, 0.0)).requires_grad_()
    entropy, values = 1.0 + by_token(batch, 0.5, 4.0), by_token(batch, 0.6, 5.0).requires_grad_()
    for count, budget in ((1, 12), (3, 30)):
        targets = build_targets(batch, config, num_minibatches=count, masked=whole.masked, **inputs_of(batch, config))
        parts = minibatches(batch, count)
        loss, of_critic, gauges = torch.zeros(()), torch.zeros(()), []
        for part in parts:
            for micro in microbatches(batch, part, budget, multiple_of=2):
                here = targets.at(micro.index)
                share, seen = policy_loss(config, logprobs[micro.index], entropy[micro.index], here)
                loss = loss + share / len(parts)
                gauges.append(seen)
                if whole.critic_gradient is not None:
                    of_critic = of_critic + critic_loss(config, values[micro.index], here)[0] / len(parts)
        torch.testing.assert_close(loss.detach(), whole.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], whole.gradient, rtol=1e-5, atol=1e-7)
        if whole.critic_gradient is not None:
            (gradient,) = torch.autograd.grad(of_critic, values)
            torch.testing.assert_close(gradient, whole.critic_gradient, rtol=1e-5, atol=1e-7)
        merged = {key: gauge.value for key, gauge in merge_all(gauges).items()}
        assert merged == pytest.approx(whole.gauges, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_order_of_groups_and_episodes_changes_nothing(name: str):
    config = AlgorithmConfig(**CONFIGS[name])
    draw = random.Random(name)
    shuffled = [replace(g, trajectories=tuple(draw.sample(g.trajectories, len(g.trajectories)))) for g in rich_groups()]
    draw.shuffle(shuffled)
    one, two = outcome(config), outcome(config, shuffled)

    def by_id(of: Any, values: torch.Tensor) -> dict[int, float]:
        return dict(zip(of.batch.tokens[of.batch.positions].tolist(), values.tolist(), strict=True))

    assert by_id(two, two.gradient) == pytest.approx(by_id(one, one.gradient), rel=1e-4, abs=1e-6)
    assert by_id(two, two.targets.advantages) == pytest.approx(by_id(one, one.targets.advantages), rel=1e-4, abs=1e-5)
    assert float(two.loss) == pytest.approx(float(one.loss), rel=1e-4, abs=1e-6)


def padded(one: Trajectory, count: int) -> Trajectory:
    """With so many tokens behind it that were not sampled."""
    *before, last = one.segments
    longer = replace(
        last,
        tokens=np.concatenate([last.tokens, np.full(count, 7, last.tokens.dtype)]),
        loss_mask=np.concatenate([last.loss_mask, np.zeros(count, last.loss_mask.dtype)]),
        logprobs=np.concatenate([last.logprobs, np.zeros(count, last.logprobs.dtype)]),
    )
    return replace(one, segments=(*before, longer))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=5, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=30, max_size=30))
def test_padding_changes_nothing(name: str, counts: list[int]):
    config, draw = AlgorithmConfig(**CONFIGS[name]), iter(counts)
    groups = [replace(g, trajectories=tuple(padded(t, next(draw)) for t in g.trajectories)) for g in rich_groups()]
    assert outcome(config, groups).numbers().tolist() == pytest.approx(outcome(config).numbers().tolist(), rel=1e-5)


COMPARING = [
    name
    for name, keys in CONFIGS.items()
    if AlgorithmConfig(**keys).compares_siblings and not AlgorithmConfig(**keys).add_token_level_kl
]


@pytest.mark.parametrize("name", COMPARING)
def test_zero_signal_groups_are_those_without_any_advantage(name: str):
    config = AlgorithmConfig(**{**CONFIGS[name], "zero_variance": "mask", "whiten_advantages": False})
    for group in rich_groups():
        batch = pack([group])
        advantages = build_targets(batch, config, **inputs_of(batch, config)).advantages
        assert carries_signal(group, config) == has_signal(torch.cat([torch.zeros(1), advantages]))


def test_nothing_at_all_has_a_loss_of_zero_that_can_be_differentiated():
    for keys in CONFIGS.values():
        config, batch = AlgorithmConfig(**keys), pack([])
        targets = build_targets(batch, config, **inputs_of(batch, config))
        nothing = torch.zeros(0, requires_grad=True)
        loss, gauges = policy_loss(config, nothing, torch.zeros(0), targets)
        loss.backward()
        assert (loss.item(), gauges["actor/pg_loss"].value) == (0.0, 0.0)
