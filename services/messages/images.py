"""PNG images in messages.

Invariants: ordered, disjoint, within the sequence, on unsampled tokens, at most `MAX_IMAGE_BYTES` each.
"""

from collections.abc import Sequence

from offbeat.services.messages.types import PromptImage, Segment

MAX_IMAGE_BYTES = 1 << 20
"""Per image; a hundred turns then fit into Redis."""
PNG = b"\x89PNG\r\n\x1a\n"


def check_images(images: Sequence[PromptImage], length: int) -> None:
    """Raise ValueError or TypeError unless the images fit."""
    position = 0
    for image in images:
        start, count, png = image.start, image.count, image.png
        if type(start) is not int or type(count) is not int or not isinstance(png, bytes):
            raise TypeError(f"an image of {type(png).__name__} at {start!r}, {count!r} tokens long")
        if count < 1 or start < position or start + count > length:
            raise ValueError(f"an image on tokens [{start}, {start + count}) is not in order inside {length} tokens")
        check_png(png)
        position = start + count


def check_png(png: bytes) -> None:
    """Raise ValueError unless it is a PNG of valid size."""
    if len(png) > MAX_IMAGE_BYTES:
        raise ValueError(f"an image of {len(png)} bytes, more than {MAX_IMAGE_BYTES}")
    if not png.startswith(PNG):
        raise ValueError("an image is not a PNG")


def check_unsampled(segment: Segment) -> None:
    for image in segment.images:
        if segment.loss_mask[image.start : image.start + image.count].any():
            raise ValueError(f"the tokens of the image at {image.start} are marked as sampled")
