"""REINFORCE: the discounted return (Williams 1992)."""

from torch import Tensor

from offbeat.trainer.algorithms.scan import discounted_sums


def discounted_returns(rewards: Tensor, last: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma * G_{t+1} within each trajectory.

    rewards: [M] float; last: [M] bool, the last token of each trajectory -> [M] float
    """
    return discounted_sums(rewards, last, gamma)
