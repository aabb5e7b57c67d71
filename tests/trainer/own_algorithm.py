"""An algorithm as a user would write it, by the signatures in docs/algorithms.md; and mistakes in one."""
# ruff: noqa: ARG001

import torch
from torch import Tensor

from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.data.batch import Batch
from offbeat.trainer.losses.policy_loss import LossInputs


def center(rewards: Tensor, batch: Batch) -> Tensor:
    """The trajectory's reward less its group's mean, on every token."""
    size = torch.bincount(batch.group).clamp(min=1)
    mean = torch.zeros(len(size)).index_add_(0, batch.group, batch.episode_reward) / size
    return (batch.episode_reward - mean[batch.group])[batch.trajectory] + 0 * rewards


def reinforce(terms: LossInputs) -> Tensor:
    return -terms.advantages * terms.logprobs


def by_ratio(terms: LossInputs) -> Tensor:
    return -terms.advantages * terms.ratio


def pay_length(trajectory: Trajectory) -> float:
    return 0.1 * trajectory.num_sampled


def halve_first(
    logprobs: Tensor, behavior_logprobs: Tensor, turn: Tensor, sequence: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    first = turn.diff(prepend=turn.new_full((1,), -1)) != 0
    return torch.where(first, 0.5, 1.0).to(logprobs), (logprobs - behavior_logprobs).abs() < 5 + 0 * sequence


def long_groups(group: Group) -> bool:
    return len(group.trajectories) > 3


def too_few(rewards: Tensor, batch: Batch) -> Tensor:
    return batch.episode_reward


def whole(rewards: Tensor, batch: Batch) -> Tensor:
    return torch.ones(len(rewards), dtype=torch.long)


def infinite(rewards: Tensor, batch: Batch) -> Tensor:
    return rewards / 0


def in_place(rewards: Tensor, batch: Batch) -> Tensor:
    return rewards.sub_(1)


def raising(rewards: Tensor, batch: Batch) -> Tensor:
    raise KeyError("no such column")


def nothing(rewards: Tensor, batch: Batch) -> None:
    return None


def detached(terms: LossInputs) -> Tensor:
    return -terms.advantages * terms.logprobs.detach()


def total(terms: LossInputs) -> Tensor:
    return (-terms.advantages * terms.logprobs).sum()


def unpaired(logprobs: Tensor, behavior_logprobs: Tensor, turn: Tensor, sequence: Tensor) -> Tensor:
    return logprobs


def float_mask(logprobs: Tensor, behavior_logprobs: Tensor, turn: Tensor, sequence: Tensor) -> tuple[None, Tensor]:
    return None, torch.ones_like(logprobs)


def int_mask(logprobs: Tensor, behavior_logprobs: Tensor, turn: Tensor, sequence: Tensor) -> tuple[None, Tensor]:
    return None, torch.ones_like(turn, dtype=torch.uint8)


def not_a_number(trajectory: Trajectory) -> float:
    return float("nan")


CONSTANT = 3
