"""Images of dataset rows as PNG."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from PIL import Image

from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.messages.images import PNG, check_png


def read_images(value: Any, folder: Path) -> tuple[bytes, ...]:
    """Return a column's images, bytes or files in `folder`.

    Raises:
        ConversationError: an image that is unreadable, too large, or outside the folder.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConversationError(f"images: expected a list, got {type(value).__name__}")
    return tuple(_read(each, folder, f"images[{i}]") for i, each in enumerate(cast(Sequence[Any], value)))


def _read(value: Any, folder: Path, name: str) -> bytes:
    if isinstance(value, Mapping):
        stored = cast(Mapping[str, Any], value)
        value = stored.get("bytes") or stored.get("path")
    if isinstance(value, str):
        value = _read_file(folder, value, name)
    if not isinstance(value, bytes):
        raise ConversationError(f"{name}: expected a path or an image's bytes, got {type(value).__name__}")
    try:
        png = value if value.startswith(PNG) else _to_png(value)
        check_png(png)
    except (ValueError, OSError, SyntaxError) as error:
        raise ConversationError(f"{name}: {error}") from error
    return png


def _read_file(folder: Path, path: str, name: str) -> bytes:
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ConversationError(f"{name}: {path} is outside the dataset's folder")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConversationError(f"{name}: {file} can't be read: {error.strerror}") from error


def _to_png(data: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(out, format="PNG")
    return out.getvalue()
