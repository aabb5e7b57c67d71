"""Generalized advantage estimation over turns (Turn-PPO, arXiv:2512.17008)."""

from torch import Tensor

from offbeat.trainer.algorithms.gae import generalized_advantages


def turn_advantages(turn_rewards: Tensor, turn_values: Tensor, last_turn: Tensor, gamma: float, lambd: float) -> Tensor:
    """Return GAE with turns as actions, V before each turn's first token. All [R]."""
    return generalized_advantages(turn_rewards, turn_values, last_turn, gamma, lambd)
