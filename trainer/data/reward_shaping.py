"""Reward shaping, before normalization."""

import math
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.algorithms.shaping import overlong_penalty
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.rewards import RewardShaping
from offbeat.trainer.data.seats import take_seat
from offbeat.trainer.data.user_functions import UserFunctionError, load_function


def shape_rewards(groups: Sequence[Group], config: AlgorithmConfig) -> list[Group]:
    """Add each episode's shaping, or each seat's, to its last turn's reward."""
    if not config.reward_shaping.is_on:
        return list(groups)
    return [
        replace(
            group,
            trajectories=tuple(_shape(trajectory, config.reward_shaping) for trajectory in group.trajectories),
            baselines=tuple(_shape(trajectory, config.reward_shaping) for trajectory in group.baselines),
        )
        for group in groups
    ]


def _shape(trajectory: Trajectory, shaping: RewardShaping) -> Trajectory:
    seats = trajectory.seats or ("",) * len(trajectory.turns)
    last_turns = {seat: number for number, seat in enumerate(seats)}
    turns = list(trajectory.turns)
    for seat, number in last_turns.items():
        played = take_seat(trajectory, seat) if trajectory.seats else trajectory
        turns[number] = turns[number]._replace(reward=turns[number].reward + compute_shaping(played, shaping))
    return structs.replace(trajectory, turns=tuple(turns))


def compute_shaping(trajectory: Trajectory, shaping: RewardShaping) -> float:
    """Return the term added to an episode's reward; at most 0 without a user function."""
    length = trajectory.num_sampled
    penalty = shaping.response_length_penalty_coef * length
    if shaping.overlong_max_length is not None:
        overlong = overlong_penalty(length, shaping.overlong_max_length, shaping.overlong_buffer)
        penalty -= shaping.overlong_penalty * overlong
    if shaping.format_penalty:
        value = trajectory.metrics.get(shaping.format_metric, 1.0)
        if math.isfinite(value):
            penalty += shaping.format_penalty * (1.0 - min(max(value, 0.0), 1.0))
    own = 0.0 if shaping.function is None else call_shaping(shaping.function, trajectory)
    return own - penalty


def call_shaping(path: str, trajectory: Trajectory) -> float:
    """Return the reward of `reward_shaping.function`; raises `UserFunctionError` unless it is a finite number."""
    result = load_function(path)(trajectory)
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise UserFunctionError(f"{path} returned {result!r}, not a finite number")
    return float(result)
