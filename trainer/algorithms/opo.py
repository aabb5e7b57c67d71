"""On-policy RL with the optimal reward baseline (OPO, arXiv:2505.23585)."""

from torch import Tensor


def length_weighted_baseline(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Subtract sum(l r) / sum(l) over the group from each reward: the baseline of least variance if a gradient's norm grows
    with length (eq. 9). A group of one gives zero; a group without tokens keeps its rewards.

    rewards: [T] float; lengths: [T] float, sampled tokens; group: [T] int64, 0-based -> [T] float
    """
    if not len(rewards):
        return rewards.clone()
    count = int(group.max()) + 1
    weighted = rewards.new_zeros(count).index_add_(0, group, lengths * rewards)
    total = rewards.new_zeros(count).index_add_(0, group, lengths)
    return rewards - (weighted / total.clamp(min=1e-9))[group]
