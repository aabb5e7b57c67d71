"""ReMax (arXiv:2310.10505)."""

from torch import Tensor


def subtract_greedy_reward(rewards: Tensor, greedy_rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract the reward of the group's greedy episode, an unbiased baseline (eq. 5).

    rewards, group: [T]; greedy_rewards: [G] -> [T]
    """
    return rewards - greedy_rewards[group]
