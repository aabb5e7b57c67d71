"""ReMax (arXiv:2310.10505): the baseline is what the greedy policy gets for the same task."""

from torch import Tensor


def less_greedy(rewards: Tensor, greedy_rewards: Tensor, group: Tensor) -> Tensor:
    """Each episode's reward less its group's greedy one, which depends on the task and not on what was sampled, so that the
    gradient stays unbiased (eq. 5).

    rewards: [T] float; greedy_rewards: [G] float; group: [T] int64, 0-based -> [T] float
    """
    return rewards - greedy_rewards[group]
