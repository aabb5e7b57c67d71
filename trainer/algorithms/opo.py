"""On-policy RL with the optimal reward baseline (OPO, arXiv:2505.23585)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.normalization import constant_groups, sum_by_group


def length_weighted_baseline(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Subtract the group's sum(l r) / sum(l), the baseline of least variance if gradient norms grow with length (eq.
    9).

    Groups of one give 0; groups without tokens keep their rewards.

    rewards, lengths (sampled tokens), group: [T] -> [T]
    """
    weighted = sum_by_group(lengths.double() * rewards.double(), group)
    baseline = (weighted / sum_by_group(lengths, group).clamp(min=1e-9))[group]
    without_tokens = (sum_by_group(lengths, group) == 0)[group]
    equal = constant_groups(rewards, group) & ~without_tokens
    return torch.where(equal, 0.0, rewards.double() - baseline).to(rewards)
