"""Image placeholders in prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import PromptImage


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
