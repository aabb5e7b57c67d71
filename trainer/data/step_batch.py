"""Input of one optimizer step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from offbeat.services.messages.types import Group
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.seats import list_members


@dataclass(frozen=True, slots=True)
class StepBatch:
    step: int
    """0-based; training produces version `step + 1`."""
    groups: tuple[Group, ...]
    shaped: tuple[Group, ...]
    """`groups` with shaped rewards."""
    masked: MaskedCounts = NO_MASKED
    """Groups counted only in loss denominators."""
    weights: tuple[float, ...] = ()
    """Policy loss factors; empty if all are 1."""
    new_rewards: Mapping[str, Sequence[float]] | None = None
    """Shaped rewards of all new groups by tag, masked and refilled included; None: of `groups`."""

    @property
    def rewards_by_tag(self) -> Mapping[str, Sequence[float]]:
        """Rewards for running statistics."""
        return collect_rewards(self.shaped) if self.new_rewards is None else self.new_rewards

    @classmethod
    def build(
        cls,
        step: int,
        groups: Sequence[Group],
        config: AlgorithmConfig,
        *,
        masked: MaskedCounts = NO_MASKED,
        weights: Sequence[float] = (),
        new_rewards: Mapping[str, Sequence[float]] | None = None,
    ) -> "StepBatch":
        return cls(step, tuple(groups), tuple(shape_rewards(groups, config)), masked, tuple(weights), new_rewards)

    def pack(self) -> list[object]:
        groups = [pack_group(group) for group in self.groups]
        rewards = {tag: list(rewards) for tag, rewards in self.rewards_by_tag.items()}
        shaped = [] if _turn_rewards(self.shaped) == _turn_rewards(self.groups) else [_turn_rewards(self.shaped)]
        return [self.step, list(self.masked), list(self.weights), groups, rewards, *shaped]

    def drop_temperature(self, default: float) -> "StepBatch":
        groups, shaped = (
            tuple(drop_temperature(each, default) for each in part) for part in (self.groups, self.shaped)
        )
        return replace(self, groups=groups, shaped=shaped)

    @classmethod
    def unpack(cls, body: Sequence[Any], config: AlgorithmConfig) -> "StepBatch":
        """Decode; without rewards (version 0.2), `groups` are all. Shaped rewards are computed where they are absent."""
        step, masked, weights, groups, *rewards = body
        members = [unpack_group(group) for group in groups]
        new_rewards = rewards[0] if rewards else None
        masked_counts = MaskedCounts(*masked)
        if len(rewards) < 2:
            return cls.build(step, members, config, masked=masked_counts, weights=weights, new_rewards=new_rewards)
        shaped = tuple(_with_rewards(group, turns) for group, turns in zip(members, rewards[1], strict=True))
        return cls(step, tuple(members), shaped, masked_counts, tuple(weights), new_rewards)


def _turn_rewards(groups: Iterable[Group]) -> list[list[list[float]]]:
    """Return each turn's reward by group and trajectory, baselines last."""
    return [
        [[turn.reward for turn in each.turns] for each in (*group.trajectories, *group.baselines)] for group in groups
    ]


def _with_rewards(group: Group, rewards: Sequence[Sequence[float]]) -> Group:
    trajectories = [
        structs.replace(each, turns=tuple(t._replace(reward=r) for t, r in zip(each.turns, turns, strict=True)))
        for each, turns in zip((*group.trajectories, *group.baselines), rewards, strict=True)
    ]
    size = len(group.trajectories)
    return replace(group, trajectories=tuple(trajectories[:size]), baselines=tuple(trajectories[size:]))


def drop_temperature(group: Group, default: float) -> Group:
    """Return the group without a temperature that is the policy's, whose logits then need no scale by token."""
    return replace(group, temperature=None) if group.temperature == default else group


def collect_rewards(groups: Iterable[Group]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for _, trajectory in list_members(tuple(groups)):
        rewards.setdefault(trajectory.tag, []).append(trajectory.reward)
    return rewards
