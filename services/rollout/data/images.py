"""Images of dataset rows as PNG."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from PIL import Image

from offbeat.envs.dataset.prompt import PromptError, list_images
from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.messages.images import PNG, check_png


def read_images(value: Any, folder: Path) -> tuple[bytes, ...]:
    """Return a column's images: bytes, data URLs, or files in `folder`.

    Raises:
        ConversationError: an image that is unreadable, too large, or outside the folder.
    """
    try:
        images = list_images(value)
    except PromptError as error:
        raise ConversationError(str(error)) from error
    return tuple(_read(each, folder, f"images[{i}]") for i, each in enumerate(images))


def _read(value: Any, folder: Path, name: str) -> bytes:
    if isinstance(value, Mapping):
        stored = cast(Mapping[str, Any], value)
        value = stored.get("bytes") or stored.get("path")
    if isinstance(value, str):
        value = _read_data(value, name) if value.startswith("data:") else _read_file(folder, value, name)
    if not isinstance(value, bytes):
        raise ConversationError(f"{name}: expected a path, a data URL or an image's bytes, got {type(value).__name__}")
    try:
        png = value if value.startswith(PNG) else _to_png(value)
        check_png(png)
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConversationError(f"{name}: {error}") from error
    return png


def _read_data(url: str, name: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("is not in base64")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ConversationError(f"{name}: a data URL ({head[:40]}) can't be read: {error}") from error


def _read_file(folder: Path, path: str, name: str) -> bytes:
    if "\0" in path:
        raise ConversationError(f"{name}: {path!r} is no path")
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
