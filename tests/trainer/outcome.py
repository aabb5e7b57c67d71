"""What a configuration makes of one rich batch: the advantages, weights, losses and gradients that it would train with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.services.messages.types import Group, StopReason, Trajectory
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.algorithms.normalization import RunningMoments
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.batch import Batch, pack
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import carries_signal, masked_counts, select_most_varied
from offbeat.trainer.losses.policy_loss import critic_loss, policy_loss
from offbeat.trainer.losses.targets import Targets, build_targets
from tests.copying import replace
from tests.trainer.trajectories import group, trajectory

VERSION = 4


def rich_groups(first: int = 0) -> list[Group]:
    """Six groups, numbered from `first`, of two tags: ragged lengths, several turns and versions, shared states, one group
    of equal rewards, one of a single episode, episodes that were cut short or badly formed."""
    groups: list[Group] = []
    for n, size in enumerate((4, 3, 4, 1, 3)):
        members = [_member(first + n, i) for i in range(size)]
        groups.append(group(first + n, *members, tag=f"tag{n % 2}"))
    base = 900 + 150 * first
    equal = [trajectory(i, [(2, 2 + i, 0.0), (1, 1, 0.5)], base=base + 20 * i, tag="tag0") for i in range(3)]
    everybody = [*groups, group(first + 5, *equal, tag="tag0")]
    return [replace(each, baselines=(_greedy(each),)) for each in everybody]


def _greedy(one: Group) -> Trajectory:
    """Of the same task, with tokens that no member has; only `remax` may look at it."""
    played = trajectory(9, [(2, 1, 0.3 * one.number)], base=3000 + 20 * one.number, tag=one.tag)
    return replace(played, baseline=True)


def _member(number: int, index: int) -> Trajectory:
    rewards = [0.2 * ((3 * number + index) % 3), 0.0, float((index + number) % 2)]
    turns = 1 + (index + number) % 3
    steps = [(2, 1 + (index + 2 * k) % 4, rewards[k] + (0.1 * index if k == turns - 1 else 0.0)) for k in range(turns)]
    made = trajectory(index, steps, base=150 * number + 30 * index, tag=f"tag{number % 2}", versions=(1, 4, 3))
    states = [turn._replace(state_hash=f"s{min(k, 1)}") for k, turn in enumerate(made.turns)]
    stop = StopReason.MAX_LENGTH if index == 2 else StopReason.TERMINATED
    return replace(
        made, turns=tuple(states), stop_reason=stop, metrics={"action_is_valid": 1 - 0.25 * index, "odd": 0.5}
    )


def by_token(batch: Batch, scale: float, phase: float) -> Tensor:
    """[M]: numbers that depend on the token alone, so that they do not depend on the order."""
    return scale * torch.cos(batch.tokens[batch.positions].float() + phase)


@dataclass(frozen=True)
class Outcome:
    """Of one batch: its targets, the policy's loss and the gradients with respect to logprobs and entropies."""

    batch: Batch
    targets: Targets
    loss: Tensor
    gradient: Tensor
    entropy_gradient: Tensor
    critic_gradient: Tensor | None
    gauges: dict[str, float]
    masked: MaskedCounts
    """Groups that count in the loss's denominators alone."""

    def numbers(self) -> Tensor:
        """Everything that is trained with, as one vector."""
        parts = [self.targets.advantages, self.targets.weights, self.loss[None], self.gradient, self.entropy_gradient]
        if self.critic_gradient is not None:
            parts.append(self.critic_gradient)
        return torch.cat(parts)


def teacher_logprobs(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """[K, M]"""
    return torch.stack([batch.behavior_logprobs + by_token(batch, 0.3, 6.0 + k) for k in range(len(config.teacher))])


def inputs_of(batch: Batch, config: AlgorithmConfig) -> dict[str, Any]:
    """What `build_targets` is given of other models."""
    running = RunningMoments()
    running.update("tag0", torch.tensor([0.0, 1.0, 3.0]))
    running.update("tag1", torch.tensor([-1.0, 0.5]))
    old = batch.behavior_logprobs + by_token(batch, 0.3, 1.0)
    return {
        "kl_coef": config.init_kl_coef,
        "old_logprobs": old if config.old_logprobs == "recompute" else None,
        "ref_logprobs": batch.behavior_logprobs + by_token(batch, 0.5, 2.0) if config.needs_reference else None,
        "divergences": by_token(batch, 0.3, 7.0) if config.kl_in_reward_is_full else None,
        "teacher_logprobs": teacher_logprobs(batch, config) if config.teacher else None,
        "values": by_token(batch, 0.4, 3.0) if config.adv_estimator == "gae" else None,
        "next_values": by_token(batch, 0.4, 8.0) if config.bootstrap_truncated else None,
        "version": VERSION,
        "running": running,
    }


def outcome(
    config: AlgorithmConfig, groups: list[Group] | None = None, *, first_step: bool = False, spread: float = 1.0
) -> Outcome:
    """Train on `rich_groups`, or on those given, as far as numbers go.

    first_step: of the batch, so that the policy and the values are those that its targets were computed with.
    spread: of the policy's logprobs around those of what sampled.
    """
    groups = groups or rich_groups()
    chosen = [each for each in groups if carries_signal(each, config)]
    left_out = [each for each in groups if not carries_signal(each, config)]
    masked = masked_counts(left_out, config) if config.zero_variance == "mask" else NO_MASKED
    selected, masked = select_most_varied(shape_rewards(chosen, config), config.variance_filter_ratio, masked)
    batch = pack(selected)
    inputs, current = inputs_of(batch, config), batch.behavior_logprobs + spread * by_token(batch, 0.4, 0.0)
    if first_step and inputs["old_logprobs"] is not None:
        inputs["old_logprobs"] = current
    targets = build_targets(batch, config, masked=masked, **inputs)
    logprobs = current.clone().requires_grad_()
    entropy = (1.0 + by_token(batch, 0.5, 4.0)).requires_grad_()
    distance = (logprobs - batch.behavior_logprobs).square() if config.kl_in_loss_is_full else None
    loss, gauges = policy_loss(config, logprobs, entropy, targets, divergence=distance)
    gradient, of_entropy = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)
    of_critic = None
    if config.adv_estimator == "gae":
        values = (inputs["values"] if first_step else by_token(batch, 0.6, 5.0)).clone().requires_grad_()
        (of_critic,) = torch.autograd.grad(critic_loss(config, values, targets)[0], values)
    unused = torch.zeros_like(entropy)
    return Outcome(
        batch,
        targets,
        loss.detach(),
        gradient,
        unused if of_entropy is None else of_entropy,
        of_critic,
        {name: gauge.value for name, gauge in gauges.items()},
        masked,
    )
