"""Pairs from a policy's own groups."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offbeat.services.messages.types import Group
from offbeat.trainer.data.seats import split_seats


def best_and_worst(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield each group's trajectories, or each seat's, of highest and lowest reward, the first of equal ones.

    Groups of equal rewards, and pairs with a trajectory without sampled tokens, are excluded.
    """
    for group in split_seats(groups):
        if not group.trajectories:
            continue
        best = max(group.trajectories, key=lambda trajectory: trajectory.reward)
        worst = min(group.trajectories, key=lambda trajectory: trajectory.reward)
        if best.reward > worst.reward and best.num_sampled and worst.num_sampled:
            yield replace(group, trajectories=(best, worst))
