"""Contents of messages: texts and images, in the parts of all APIs. Functions raise InvalidCallError."""

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

from offbeat.envs.prompts import ROW_IMAGE
from offbeat.services.chat.image_files import read_data_url
from offbeat.services.gateway.request_fields import Body, read_object, require
from offbeat.services.gateway.session import InvalidCallError

TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "redacted_thinking")
IMAGES = ("image_url", "image", "input_image")
"""Of chat completions, Anthropic and responses."""
IMAGE_ROLES = ("user", "tool")


class Content(NamedTuple):
    text: str
    """`ROW_IMAGE` in place of each image."""
    images: tuple[bytes, ...] = ()
    """As they were sent."""


def words(value: Any, where: str) -> str:
    """Return the text of a content without images."""
    return read_content(value, where, role="system").text


def read_content(value: Any, where: str, *, role: str) -> Content:
    """Return a content's texts, joined by newlines, and images, which stand between them as they are."""
    if value is None or isinstance(value, str):
        return Content(value or "")
    if not isinstance(value, list):
        raise InvalidCallError(f"{where} is a {type(value).__name__}: text or a list of parts is needed")
    text, images, follows_text = "", list[bytes](), False
    for part in value:
        kind = _kind(part)
        if kind in THOUGHTS:
            continue
        is_image = kind in IMAGES
        if is_image:
            require(role in IMAGE_ROLES, f"{where}: images are the user's or a tool's, not of the role {role}")
            images.append(_read_image(part, kind, where))
            text += ROW_IMAGE
        else:
            text += ("\n" if follows_text else "") + _read_text(part, kind, where)
        follows_text = not is_image
    has_mark = bool(images) and text.count(ROW_IMAGE) != len(images)
    require(not has_mark, f"{where}: has U+FDD0, which is no character")
    return Content(text, tuple(images))


def _kind(part: Any) -> str:
    return str(part.get("type", "text")) if isinstance(part, Mapping) else "text"


def _read_text(part: Any, kind: str, where: str) -> str:
    if isinstance(part, str):
        return part
    require(isinstance(part, Mapping), f"{where} has a part that is no object: {part!r}")
    require(kind in TEXTS, f"{where} has a part of type {kind!r}: texts and images are read alone")
    return str(part.get("text") or part.get("refusal") or "")


def _read_image(part: Body, kind: str, where: str) -> bytes:
    source = read_object(part, "source") if kind == "image" else {}
    url = part.get("image_url") if kind != "image" else source.get("url")
    url = url.get("url") if isinstance(url, Mapping) else url
    try:
        if isinstance(url, str) and url.startswith("data:"):
            return read_data_url(url)
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return base64.b64decode(source["data"], validate=True)
    except ValueError as error:
        raise InvalidCallError(f"{where}: an image can't be read: {error}") from error
    given = f"the URL {url[:60]!r}" if isinstance(url, str) else "no image"
    raise InvalidCallError(
        f"{where}: an image part has {given}; the gateway fetches nothing: send the image itself, as a data: URL "
        "(data:image/png;base64,...) or, by Anthropic's API, a source of type base64"
    )
