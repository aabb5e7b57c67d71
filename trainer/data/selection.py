"""Selection of a step's groups and episodes; order decides only ties of the variance filter."""

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.algorithms.normalization import has_signal
from offbeat.trainer.checks.algorithm import load_filter
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.estimators import DECOUPLED
from offbeat.trainer.config.query_filter import QueryFilter
from offbeat.trainer.data.batch import Batch, pack
from offbeat.trainer.data.reward_parts import decoupled_rewards, read_reward_parts
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.seats import reward_deviation, split_seats


def carries_signal(group: Group, config: AlgorithmConfig, shaped: Group | None = None) -> bool:
    """Return whether a group passes the filters and, if the estimator compares siblings, its rewards differ, of any
    seat; always True for `zero_variance: train`.
    """
    if config.zero_variance == "train":
        return True
    if len(seats := split_seats([group])) > 1:
        return any(carries_signal(seat, config) for seat in seats)
    if config.difficulty_mask and group.trajectories:
        mean = statistics.fmean(trajectory.reward for trajectory in group.trajectories)
        if not config.difficulty_low_threshold < mean < config.difficulty_high_threshold:
            return False
    query_filter = config.query_filter_config.get(group.tag)
    if query_filter is not None and not _passes(query_filter, group):
        return False
    if config.group_filter_cls is not None and not _filter(config.group_filter_cls)(group):
        return False
    if not config.compares_siblings:
        return True
    group = shape_rewards([group], config)[0] if shaped is None else shaped
    compared = (*group.trajectories, *group.baselines) if config.num_baselines else group.trajectories
    rewards = [trajectory.reward for trajectory in compared]
    if config.adv_estimator in DECOUPLED:
        parts = read_reward_parts(group.trajectories)
        return has_signal(decoupled_rewards(config, parts, torch.zeros(len(group.trajectories), dtype=torch.int64)))
    if config.adv_estimator == "step_reinforce":
        return _turns_differ(group, config, by_state=config.reward_normalization.grouping == "state")
    compares_turns = config.adv_estimator == "gigpo" and config.step_reward_weight > 0
    compares_episodes = config.adv_estimator != "gigpo" or config.episode_reward_weight > 0
    return (compares_episodes and has_signal(torch.tensor(rewards))) or (
        compares_turns and _turns_differ(group, config, by_state=True)
    )


def _passes(query_filter: QueryFilter, group: Group) -> bool:
    rewards = [trajectory.reward for trajectory in group.trajectories] or [0.0]
    args = query_filter.filter_args
    if query_filter.type == "mean_filter":
        return args.threshold_down < statistics.fmean(rewards) < args.threshold_up
    return statistics.pstdev(rewards) > args.std_threshold


def _turns_differ(group: Group, config: AlgorithmConfig, *, by_state: bool) -> bool:
    """Compare returns of all turns, or of turns at the same state."""
    returns: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        value = 0.0
        for turn in reversed(trajectory.turns):
            value = turn.reward + config.step_reward_gamma * value
            if turn.state_hash or not by_state:
                returns.setdefault(turn.state_hash if by_state else "", []).append(value)
    return any(has_signal(torch.tensor(values)) for values in returns.values())


@lru_cache(maxsize=8)
def _filter(path: str) -> Callable[[Group], bool]:
    found = load_filter(path)
    return cast(Callable[[Group], bool], found() if isinstance(found, type) else found)


def select_most_varied(
    groups: Sequence[Group], ratio: float, masked: MaskedCounts = NO_MASKED
) -> tuple[list[Group], MaskedCounts]:
    """Select the fraction `ratio` of groups, at least one, with the largest reward deviation (StarPO-S; RAGEN,
    arXiv:2504.20073).

    masked: selected last; the selected part is returned.
    """
    if ratio >= 1 or not groups:
        return list(groups), masked
    count = max(1, round(ratio * (len(groups) + masked.groups)))
    deviation = [reward_deviation(group) for group in groups]
    chosen = sorted(sorted(range(len(groups)), key=lambda i: -deviation[i])[:count])
    num_masked = max(0, count - len(groups))
    share = num_masked / max(1, masked.groups)
    tokens, sequences, _, episodes = (round(count * share) for count in masked)
    selected = MaskedCounts(tokens, sequences, num_masked, episodes)
    return [groups[i] for i in chosen], selected


def trained_episodes(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Mask the episodes in the loss, [T] bool; group statistics include the others."""
    trained = torch.ones(batch.num_trajectories, dtype=torch.bool)
    if config.max_len_mask:
        trained &= ~batch.truncated
    if config.error_max_len_clip:
        trained &= (batch.episode_reward > 0) | (batch.lengths <= config.error_max_len_threshold)
    return trained


def masked_counts(masked: Sequence[Group], config: AlgorithmConfig) -> MaskedCounts:
    """Return the masked groups' part of denominators."""
    batch = pack(masked)
    trained = trained_episodes(batch, config)
    sequences = int((trained & (batch.lengths > 0)).sum())
    return MaskedCounts(int(trained[batch.trajectory].sum()), sequences, len(masked), batch.num_trajectories)


def episode_weights(batch: Batch, config: AlgorithmConfig) -> Tensor | None:
    """Return policy loss factors, [T] float, or None if all are 1."""
    if not (config.difficulty_loss_weight or config.length_loss_weight) or not batch.num_trajectories:
        return None
    weights = torch.ones(batch.num_trajectories)
    if config.difficulty_loss_weight:
        size = torch.bincount(batch.group).clamp(min=1)
        mean = torch.zeros(len(size)).index_add_(0, batch.group, batch.episode_reward) / size
        weights = weights * (0.5 + 1.5 * (1.0 - mean.clamp(0.0, 1.0)))[batch.group]
    if config.length_loss_weight:
        weights = weights * (1.5 - batch.lengths / batch.lengths.max().clamp(min=1))
    return weights
