"""On-policy RL with the optimal reward baseline (OPO, arXiv:2505.23585)."""

from torch import Tensor


def length_weighted_baseline(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Each reward less sum(l r) / sum(l) over its group: the baseline of least variance where a gradient's size grows with
    length (eq. 9). A group of one gives zero; one without a token keeps its rewards less nothing.

    rewards: [T] float; lengths: [T] float, sampled tokens; group: [T] int64, 0-based -> [T] float
    """
    if not len(rewards):
        return rewards.clone()
    count = int(group.max()) + 1
    weighted = rewards.new_zeros(count).index_add_(0, group, lengths * rewards)
    total = rewards.new_zeros(count).index_add_(0, group, lengths)
    return rewards - (weighted / total.clamp(min=1e-9))[group]
