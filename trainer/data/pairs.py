"""Pairs from a policy's own groups."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offbeat.services.messages.types import Group


def best_and_worst(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield each group's trajectories of highest and lowest reward, the first of equal ones.

    Groups of equal rewards, and pairs with a trajectory without sampled tokens, are excluded.
    """
    for group in groups:
        best = max(group.trajectories, key=lambda trajectory: trajectory.reward)
        worst = min(group.trajectories, key=lambda trajectory: trajectory.reward)
        if best.reward > worst.reward and best.num_sampled and worst.num_sampled:
            yield replace(group, trajectories=(best, worst))
