"""Msgpack of a trajectory: columns as little-endian bytes."""

from typing import Any, cast

import msgpack
import numpy as np

from offbeat.services.control.console.schemas import SegmentView, TrajectoryView

MSGPACK_TYPE = "application/msgpack"
INT_COLUMNS = ("tokens", "versions")
"""int32."""
BYTE_COLUMNS = ("mask", "outcome")
FLOAT_COLUMNS = ("logprobs", "trainer_logprobs", "ratio", "advantages")
"""float32, NaN for null."""


def pack_trajectory(view: TrajectoryView) -> bytes:
    body = view.model_dump(mode="json", exclude={"segments"})
    return cast(bytes, msgpack.packb({**body, "segments": [_pack_segment(segment) for segment in view.segments]}))


def _pack_segment(segment: SegmentView) -> dict[str, Any]:
    ints = {name: np.asarray(getattr(segment, name), dtype="<i4").tobytes() for name in INT_COLUMNS}
    flags = {name: bytes(getattr(segment, name)) for name in BYTE_COLUMNS}
    floats = {name: np.asarray(getattr(segment, name), dtype="<f4").tobytes() for name in FLOAT_COLUMNS}
    return {**ints, **flags, **floats, "images": [image.model_dump() for image in segment.images]}
