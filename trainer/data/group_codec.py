"""Groups as plain values that msgpack packs: between ranks, and in checkpoints."""

from typing import Any

from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import Group


def pack_group(group: Group) -> list[object]:
    """Plain values; trajectories in the buffer's own form."""
    members = [encode_trajectory(trajectory) for trajectory in (*group.trajectories, *group.baselines)]
    head = [group.entry_id, group.group_id, group.number, group.tag, group.seed, group.admitted_version]
    return [*head, group.temperature, members]


def unpack_group(body: list[Any]) -> Group:
    """What `pack_group` was given."""
    *head, temperature, members = body
    everybody = [decode_trajectory(member) for member in members]
    return Group(
        *head,
        trajectories=tuple(each for each in everybody if not each.baseline),
        temperature=temperature,
        baselines=tuple(each for each in everybody if each.baseline),
    )
