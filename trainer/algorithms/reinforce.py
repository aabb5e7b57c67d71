"""REINFORCE (Williams 1992)."""

from torch import Tensor

from offbeat.trainer.algorithms.scan import discounted_sums


def discounted_returns(rewards: Tensor, last: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma * G_{t+1} within each trajectory. All [M]."""
    return discounted_sums(rewards, last, gamma)
