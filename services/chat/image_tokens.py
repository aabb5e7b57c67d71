"""Image placeholders in prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.services.errors import EpisodeError, RolloutError
from offbeat.services.messages.types import PromptImage

TEXT = "offbeattext"


class ImageReader(Protocol):
    """Interface of `vision.ImageProcessor`."""

    image_token_id: int

    def count(self, png: bytes, /) -> int:
        """Count tokens; raise ValueError if unreadable."""
        ...


@dataclass(frozen=True, slots=True)
class ImageTokens:
    mark: str
    """Placeholder in a message."""
    reader: ImageReader

    def place(self, ids: tuple[int, ...], pngs: Sequence[bytes]) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Expand a prompt's placeholders; positions count from its start.

        Raises:
            EpisodeError: another number of placeholders (an observation may contain one), or an unreadable image.
        """
        placeholder = self.reader.image_token_id
        if ids.count(placeholder) != len(pngs):
            raise EpisodeError("bad_observation", f"{ids.count(placeholder)} placeholders for {len(pngs)} images")
        expanded: list[int] = []
        images: list[PromptImage] = []
        rest = iter(pngs)
        for token in ids:
            if token == placeholder:
                png = next(rest)
                count = self._count(png)
                images.append(PromptImage(len(expanded), count, png))
                expanded += [placeholder] * count
            else:
                expanded.append(token)
        return tuple(expanded), tuple(images)

    def _count(self, png: bytes) -> int:
        try:
            return self.reader.count(png)
        except ValueError as error:
            raise EpisodeError("bad_image", str(error)) from error


def make_image_tokens(
    render: Callable[[list[dict[str, Any]]], str], reader: Callable[[], ImageReader] | None
) -> ImageTokens:
    """Return a policy's image support. render: with the generation prompt. reader: creates the image reader.

    Raises:
        RolloutError: the model or its template has none.
    """
    if reader is None:
        raise RolloutError("images need a model folder with an image processor, and none is given")
    return ImageTokens(_find_mark(render), reader())


def _find_mark(render: Callable[[list[dict[str, Any]]], str]) -> str:
    from jinja2 import TemplateError

    parts = [{"type": "image"}, {"type": "text", "text": TEXT}]
    try:
        plain, with_image = (render([{"role": "user", "content": content}]) for content in (TEXT, parts))
    except (TemplateError, TypeError) as error:
        raise RolloutError(f"the chat template renders no images: {error}") from error
    before, after = (text.partition(TEXT) for text in (plain, with_image))
    if not after[0].startswith(before[0]) or after[0] == before[0] or after[2] != before[2]:
        raise RolloutError("the chat template renders no images: use a vision-language model, such as Qwen2.5-VL")
    return after[0].removeprefix(before[0])
