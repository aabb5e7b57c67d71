"""Generalized advantage estimation over turns (Turn-PPO, arXiv:2512.17008)."""

from torch import Tensor

from offbeat.trainer.algorithms.gae import generalized_advantages


def turn_advantages(turn_rewards: Tensor, turn_values: Tensor, last_turn: Tensor, gamma: float, lambd: float) -> Tensor:
    """Return GAE with a turn as one action: V is that before the turn's first token, and gamma and lambda count turns.

    turn_rewards, turn_values: [R] float; last_turn: [R] bool, the last turn of each trajectory -> [R] float
    """
    return generalized_advantages(turn_rewards, turn_values, last_turn, gamma, lambd)
