"""Every estimator and every loss learns: a small policy plays a game of two turns and is trained on what it sampled.

A turn shows one of four words and pays half for naming the next one in the alphabet; the game is played with the policy's
own logits, so whatever had the wrong sign anywhere between a reward and a weight would not get better.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.services.messages.types import (
    Group,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.copying import replace
from tests.fakes import train_on
from tests.trainer.plain_engine import PlainEngine

pytestmark = pytest.mark.slow

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
WORDS, GROUPS, MEMBERS = 4, 8, 6
SEVERAL: dict[str, Any] = {"ppo_epochs": 3}
"""Passes over a batch, after the first of which the ratio is not 1."""
RECOMPUTE: dict[str, Any] = {"old_logprobs": "recompute"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"adv_estimator": name} for name in ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "gdpo", "remax", "gigpo")},
    **{
        name: {"adv_estimator": name, "whiten_advantages": True}
        for name in ("reinforce", "step_reinforce", "agentic_reinforce")
    },
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"adv_estimator": "reinforce_plus_plus_baseline"},
    "gae": {"adv_estimator": "gae", "zero_variance": "train"},
    "gae of turns": {"adv_estimator": "gae", "gae_level": "turn", "zero_variance": "train"},
    "value head": {"adv_estimator": "gae", "zero_variance": "train", "critic": {"backbone": "policy"}},
    "vtrace": {"adv_estimator": "gae", "value_targets": "vtrace", **RECOMPUTE},
    **{
        name: {"pg_variant": name, **SEVERAL}
        for name in ("ppo", "vanilla", "tis", "cispo", "topr", "kimi15", "aipo", "dppo_tv", "sapo", "gpg")
    },
    "gspo": {"ratio_type": "sequence", "loss_agg_mode": "seq-mean-token-mean", **SEVERAL},
    "decoupled ppo": {
        **RECOMPUTE,
        **SEVERAL,
        "train_infer_correction": {"is_weight": {}, "filters": [{"ratio_high": 5.0}]},
    },
    "loglinear": {"old_logprobs": "loglinear", **SEVERAL},
}


def sampled(policy: PackedPolicy, rows: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token after each row [B, n] and its logprob."""
    batch, length = rows.shape
    packing = Packing.of(torch.arange(0, (batch + 1) * length, length))
    with torch.no_grad():
        logits = policy.model(rows.reshape(1, -1), attention_mask=None, packing=packing, use_cache=False).logits[0]
    logprobs = logits[length - 1 :: length].float().log_softmax(-1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=draw)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def play(policy: PackedPolicy, version: int, draw: torch.Generator) -> list[Group]:
    """Groups of episodes that see the same two words."""
    seen = torch.randint(0, WORDS, (GROUPS, 2), generator=draw).repeat_interleave(MEMBERS, 0)
    rows = seen[:, :1]
    first, first_logprob = sampled(policy, rows, draw)
    rows = torch.cat([rows, first[:, None], seen[:, 1:]], 1)
    second, second_logprob = sampled(policy, rows, draw)
    rows = torch.cat([rows, second[:, None]], 1)
    paid = 0.5 * torch.stack([first, second], 1).eq((seen + 1) % WORDS).float()
    mask = np.array([False, True, False, True])
    spans = (VersionSpan(1, 2, version), VersionSpan(3, 4, version))
    groups: list[Group] = []
    for number in range(GROUPS):
        members: list[Trajectory] = []
        for index in range(MEMBERS):
            i = number * MEMBERS + index
            logprobs = np.array([0, float(first_logprob[i]), 0, float(second_logprob[i])], dtype=np.float32)
            segment = Segment(rows[i].numpy().astype(np.int32), mask, logprobs, spans)
            turns = tuple(Turn(0, 2 * k + 1, 2 * k + 2, float(paid[i, k]), f"{k}:{int(seen[i, k])}") for k in range(2))
            members.append(Trajectory("g", index, 0, "words", 0, (segment,), turns, StopReason.TERMINATED))
        groups.append(Group("0-0", "g", number, "words", 0, version, tuple(members)))
    return groups


def play_greedily(policy: PackedPolicy, groups: list[Group]) -> list[Group]:
    """The groups with what the policy would do without chance, as far as rewards go: nothing else of it may count."""
    return [replace(group, baselines=(greedy_episode(policy, group.trajectories[0]),)) for group in groups]


def greedy_episode(policy: PackedPolicy, sibling: Trajectory) -> Trajectory:
    seen = torch.from_numpy(sibling.segments[0].tokens[[0, 2]]).long()
    row, turns = torch.zeros(0, dtype=torch.int64), []
    for turn, word in zip(sibling.turns, seen, strict=True):
        row = torch.cat([row, word[None]])
        packing = Packing.of(torch.tensor([0, len(row)]))
        with torch.no_grad():
            logits = policy.model(row[None], attention_mask=None, packing=packing, use_cache=False).logits[0]
        row = torch.cat([row, logits[-1].argmax()[None]])
        turns.append(turn._replace(reward=0.5 * float(row[-1] == (word + 1) % WORDS)))
    return replace(sibling, index=MEMBERS, turns=tuple(turns), baseline=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_learns(name: str, folder: Path):
    chosen = ALGORITHMS[name]
    tree = chosen | {"max_steps": 1000, "critic": {"training_args": {"learning_rate": 2e-2}} | chosen.get("critic", {})}
    training = {"actor_train": {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 4096}}}
    config = LearnerConfig.model_validate_json(json.dumps(tree | training))
    policy = load_policy(folder, ModelArgs(), seed=1, value_head=config.has_value_head)
    critic = PlainEngine(load_critic(folder, ModelArgs(), seed=1)) if config.has_own_critic else None
    batches = BatchTrainer(config, StepModels(PlainEngine(policy), critic, None), ALONE)
    draw = torch.Generator().manual_seed(0)
    rewards: list[float] = []
    for step in range(12):
        groups = play(policy, step, draw)
        if config.num_baselines:
            groups = play_greedily(policy, groups)
        rewards.append(sum(t.reward for g in groups for t in g.trajectories) / (GROUPS * MEMBERS))
        train_on(batches, groups, step)
    assert sum(rewards[-4:]) / 4 > 3 * rewards[0]
