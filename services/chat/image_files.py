"""Images of dataset rows and requests as PNG."""

import base64
import io
import struct
import zlib

from PIL import Image

from offbeat.services.messages.images import PNG, check_png

MAX_PIXELS = 1 << 25
"""100 MB when decoded; image processors shrink images of more than a third of it."""
MALFORMED = (
    *(OSError, SyntaxError, EOFError, IndexError, TypeError, struct.error, zlib.error),
    *(Image.DecompressionBombError, Image.DecompressionBombWarning),
)
"""What Pillow raises for a malformed file, besides ValueError."""


def read_data_url(url: str) -> bytes:
    """Return the data of a URL in base64; raises ValueError."""
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("is not in base64")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"a data URL ({head[:40]}) can't be read: {error}") from error


def to_png(data: bytes, formats: tuple[str, ...] | None = None) -> bytes:
    """Return a PNG as it is, and an image of another format in RGB.

    formats: Pillow's names of those that are read; None: all.

    Raises:
        ValueError: unreadable, or too large.
    """
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"an image of {image.width} x {image.height} pixels, more than {MAX_PIXELS} in all")
            png = data if data.startswith(PNG) else _encode(image)
    except MALFORMED as error:
        raise ValueError(str(error) or type(error).__name__) from error
    check_png(png)
    return png


def _encode(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.convert("RGB").save(out, format="PNG")
    return out.getvalue()
