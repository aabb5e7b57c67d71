"""Rewards of groups as the configuration shapes them, before anything is compared."""

from collections.abc import Sequence
from dataclasses import replace

from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.algorithms.shaping import overlong_penalty
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.rewards import RewardShaping


def shape_rewards(groups: Sequence[Group], config: AlgorithmConfig) -> list[Group]:
    """The groups with each episode's shaping added to its last turn; the same groups where nothing is configured."""
    if not config.reward_shaping.is_on:
        return list(groups)
    return [
        replace(
            group,
            trajectories=tuple(_shaped(each, config.reward_shaping) for each in group.trajectories),
            baselines=tuple(_shaped(each, config.reward_shaping) for each in group.baselines),
        )
        for group in groups
    ]


def _shaped(trajectory: Trajectory, shaping: RewardShaping) -> Trajectory:
    if not trajectory.turns:
        return trajectory
    *before, last = trajectory.turns
    return replace(trajectory, turns=(*before, last._replace(reward=last.reward + shaping_of(trajectory, shaping))))


def shaping_of(trajectory: Trajectory, shaping: RewardShaping) -> float:
    """What is added to an episode's reward; never positive."""
    length = trajectory.num_sampled
    taken = shaping.response_length_penalty_coef * length
    if shaping.overlong_max_length is not None:
        soft = overlong_penalty(length, shaping.overlong_max_length, shaping.overlong_buffer)
        taken -= shaping.overlong_penalty * soft
    if shaping.format_penalty:
        taken += shaping.format_penalty * (1.0 - trajectory.metrics.get(shaping.format_metric, 1.0))
    return -taken
