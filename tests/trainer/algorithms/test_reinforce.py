import torch

from offbeat.trainer.algorithms.reinforce import discounted_returns

LAST = torch.tensor([False, False, True, False, True])


def test_undiscounted_terminal_reward_reaches_all_tokens_of_its_trajectory():
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0])
    assert discounted_returns(rewards, LAST, 1.0).tolist() == [1.0, 1.0, 1.0, -1.0, -1.0]


def test_discount_counts_sampled_tokens():
    rewards = torch.tensor([8.0, 0.0, 4.0, 2.0, 1.0])
    assert discounted_returns(rewards, LAST, 0.5).tolist() == [9.0, 2.0, 4.0, 2.5, 1.0]


def test_gamma_zero_returns_own_rewards():
    rewards = torch.tensor([8.0, 0.0, 4.0, 2.0, 1.0])
    assert torch.equal(discounted_returns(rewards, LAST, 0.0), rewards)
