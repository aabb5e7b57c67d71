"""ReMax (arXiv:2310.10505): the reward of a greedy episode of the same task as the baseline."""

from torch import Tensor


def subtract_greedy_reward(rewards: Tensor, greedy_rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract the group's greedy reward, which is independent of the samples: the gradient stays unbiased (eq. 5).

    rewards: [T] float; greedy_rewards: [G] float; group: [T] int64, 0-based -> [T] float
    """
    return rewards - greedy_rewards[group]
