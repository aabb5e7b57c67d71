"""Input of one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.services.messages.types import Group
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.data.reward_shaping import shape_rewards


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Groups of one optimizer step."""

    step: int
    """0-based; training produces version `step + 1`."""
    groups: tuple[Group, ...]
    shaped: tuple[Group, ...]
    """`groups` with shaped rewards."""
    masked: MaskedCounts = NO_MASKED
    """Groups counted in loss denominators only."""
    weights: tuple[float, ...] = ()
    """Policy loss factors; empty if all are 1."""

    @classmethod
    def build(
        cls,
        step: int,
        groups: Sequence[Group],
        config: AlgorithmConfig,
        *,
        masked: MaskedCounts = NO_MASKED,
        weights: Sequence[float] = (),
    ) -> "StepBatch":
        """Build a batch from unshaped groups."""
        return cls(step, tuple(groups), tuple(shape_rewards(groups, config)), masked, tuple(weights))

    def pack(self) -> list[object]:
        """Encode as plain values for msgpack."""
        return [self.step, list(self.masked), list(self.weights), [pack_group(group) for group in self.groups]]

    @classmethod
    def unpack(cls, body: Sequence[Any], config: AlgorithmConfig) -> "StepBatch":
        step, masked, weights, groups = body
        members = [unpack_group(group) for group in groups]
        return cls.build(step, members, config, masked=MaskedCounts(*masked), weights=weights)
