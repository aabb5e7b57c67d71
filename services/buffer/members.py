"""Members of complete groups, as Redis holds them, and what rewards of the whole group add to them."""

from collections.abc import Mapping

import msgspec
from msgspec import structs

from offbeat.services.errors import CodecError
from offbeat.services.messages.codec import decode_trajectory
from offbeat.services.messages.types import Message, Trajectory

ADDED = "+"
"""Prefix of an addition's field, before the member's number."""


class Addition(Message, frozen=True):
    """What rewards of the whole group add to a member's trajectory."""

    score: float
    """Added on the last turn."""
    metrics: dict[str, float]


def encode_addition(addition: Addition) -> bytes:
    return msgspec.msgpack.encode(addition)


def member_numbers(fields: Mapping[str, bytes]) -> list[int]:
    """Return the members among the fields of a group's trajectories, in order."""
    return sorted(int(name) for name in fields if name.isdecimal())


def decode_member(fields: Mapping[str, bytes], group_id: str, index: int) -> Trajectory:
    """Decode a member with its addition, if any.

    Raises:
        CodecError: it can't be decoded, or belongs to another place.
    """
    trajectory = decode_trajectory(fields[str(index)])
    if (trajectory.group_id, trajectory.index) != (group_id, index):
        raise CodecError(f"{trajectory.group_id}/{trajectory.index} is stored as {group_id}/{index}")
    blob = fields.get(f"{ADDED}{index}")
    return trajectory if blob is None else _add(trajectory, blob)


def _add(trajectory: Trajectory, blob: bytes) -> Trajectory:
    try:
        addition = msgspec.msgpack.decode(blob, type=Addition)
    except msgspec.MsgspecError as error:
        raise CodecError(f"the rewards of its group can't be decoded: {error}") from error
    return add_to(trajectory, addition)


def add_to(trajectory: Trajectory, addition: Addition) -> Trajectory:
    *earlier, last = trajectory.turns
    scored = last._replace(reward=last.reward + addition.score)
    return structs.replace(trajectory, turns=(*earlier, scored), metrics={**trajectory.metrics, **addition.metrics})
