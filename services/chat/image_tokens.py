"""Image placeholders in prompts."""

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

    def place(
        self, ids: tuple[int, ...], png: bytes, num_images: int
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Expand a prompt's placeholders; positions count from its start.

        Raises:
            EpisodeError: not `num_images` placeholders (an observation may contain one), or an unreadable image.
        """
        placeholder = self.reader.image_token_id
        if ids.count(placeholder) != num_images:
            raise EpisodeError("bad_observation", f"{ids.count(placeholder)} placeholders for {num_images} images")
        try:
            count = self.reader.count(png)
        except ValueError as error:
            raise EpisodeError("bad_image", str(error)) from error
        expanded: list[int] = []
        images: list[PromptImage] = []
        for token in ids:
            if token == placeholder:
                images.append(PromptImage(len(expanded), count, png))
                expanded += [placeholder] * count
            else:
                expanded.append(token)
        return tuple(expanded), tuple(images)
