"""PNG images in messages.

Invariants: ordered, disjoint, within the sequence, on unsampled tokens, at most `MAX_PICTURE_BYTES` each.
"""

from collections.abc import Sequence

from offbeat.services.messages.types import Picture, Segment

MAX_PICTURE_BYTES = 1 << 20
"""Maximum of one image; a trajectory of a hundred turns then fits into Redis."""
PNG = b"\x89PNG\r\n\x1a\n"


def check_pictures(pictures: Sequence[Picture], length: int) -> None:
    """Raise ValueError or TypeError unless the images fit `length` tokens."""
    position = 0
    for picture in pictures:
        start, count, png = picture.start, picture.count, picture.png
        if type(start) is not int or type(count) is not int or not isinstance(png, bytes):
            raise TypeError(f"a picture of {type(png).__name__} at {start!r}, {count!r} tokens long")
        if count < 1 or start < position or start + count > length:
            raise ValueError(f"a picture on tokens [{start}, {start + count}) is not in order inside {length} tokens")
        check_png(png)
        position = start + count


def check_png(png: bytes) -> None:
    """Raise ValueError unless it is a PNG of valid size."""
    if len(png) > MAX_PICTURE_BYTES:
        raise ValueError(f"a picture of {len(png)} bytes, more than {MAX_PICTURE_BYTES}")
    if not png.startswith(PNG):
        raise ValueError("a picture is not a PNG")


def check_unsampled(segment: Segment) -> None:
    """Raise ValueError if an image token is sampled."""
    for picture in segment.pictures:
        if segment.loss_mask[picture.start : picture.start + picture.count].any():
            raise ValueError(f"the tokens of the picture at {picture.start} are marked as sampled")
