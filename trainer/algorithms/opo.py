"""On-policy RL with the optimal reward baseline (OPO, arXiv:2505.23585)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.normalization import constant_groups, sum_by_group


def length_weighted_baseline(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Subtract the group's sum(l r) / sum(l), of least variance if gradient norms grow with length (eq. 9).

    Groups of one give 0; groups without tokens keep their rewards. rewards, lengths (sampled tokens), group: [T] -> [T]
    """
    weighted = sum_by_group(lengths.double() * rewards.double(), group)
    tokens = sum_by_group(lengths, group)
    baseline = (weighted / tokens.clamp(min=1e-9))[group]
    equal = constant_groups(rewards, group) & (tokens > 0)[group]
    return torch.where(equal, 0.0, rewards.double() - baseline).to(rewards)
