"""Images of dataset rows as PNG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from offbeat.envs.dataset.prompt import PromptError, list_images
from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.chat.image_files import read_data_url, to_png


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
    try:
        if isinstance(value, str):
            value = read_data_url(value) if value.startswith("data:") else _read_file(folder, value)
        if not isinstance(value, bytes):
            raise ValueError(f"expected a path, a data URL or an image's bytes, got {type(value).__name__}")
        return to_png(value)
    except ValueError as error:
        raise ConversationError(f"{name}: {error}") from error


def _read_file(folder: Path, path: str) -> bytes:
    if "\0" in path:
        raise ValueError(f"{path!r} is no path")
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is outside the dataset's folder")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from error
