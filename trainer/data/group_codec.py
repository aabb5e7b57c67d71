"""Msgpack encoding of groups between ranks and in checkpoints."""

from typing import Any

from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import Group

NUM_HEAD_FIELDS = 6


def pack_group(group: Group) -> list[object]:
    members = [encode_trajectory(trajectory) for trajectory in (*group.trajectories, *group.baselines)]
    head = [group.entry_id, group.group_id, group.number, group.tag, group.seed, group.admitted_version]
    return [*head, group.temperature, members, dict(group.scores)]


def unpack_group(body: list[Any]) -> Group:
    """Decode a group, also of earlier builds, without scores."""
    head, (temperature, members, *scores) = body[:NUM_HEAD_FIELDS], body[NUM_HEAD_FIELDS:]
    trajectories = [decode_trajectory(member) for member in members]
    return Group(
        *head,
        trajectories=tuple(trajectory for trajectory in trajectories if not trajectory.baseline),
        temperature=temperature,
        baselines=tuple(trajectory for trajectory in trajectories if trajectory.baseline),
        scores=scores[0] if scores else {},
    )
