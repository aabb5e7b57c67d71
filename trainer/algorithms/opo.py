"""On-policy RL with the optimal reward baseline (OPO, arXiv:2505.23585)."""

from torch import Tensor


def length_weighted_baseline(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Subtract the group's sum(l r) / sum(l), the baseline of least variance if gradient norms grow with length (eq.
    9).

    Groups of one give 0; groups without tokens keep their rewards.

    rewards, lengths (sampled tokens), group: [T] -> [T]
    """
    if not len(rewards):
        return rewards.clone()
    count = int(group.max()) + 1
    weighted = rewards.new_zeros(count).index_add_(0, group, lengths * rewards)
    total = rewards.new_zeros(count).index_add_(0, group, lengths)
    return rewards - (weighted / total.clamp(min=1e-9))[group]
