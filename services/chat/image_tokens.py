"""Image placeholders in prompts."""

from dataclasses import dataclass
from typing import Protocol

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Picture


class ImageReader(Protocol):
    """Counts image tokens (`vision.PictureReader`)."""

    image_token_id: int

    def count(self, png: bytes, /) -> int:
        """Return an image's token count. Raises ValueError if unreadable."""
        ...


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Expands image placeholders to image tokens."""

    mark: str
    """Placeholder in a message."""
    reader: ImageReader

    def place(self, ids: tuple[int, ...], png: bytes, num_pictures: int) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Expand a prompt's placeholders, all for one image; positions count from its start.

        Raises:
            EpisodeError: not `num_pictures` placeholders (an observation may contain one), or an unreadable image.
        """
        placeholder = self.reader.image_token_id
        if ids.count(placeholder) != num_pictures:
            raise EpisodeError("bad_observation", f"{ids.count(placeholder)} placeholders for {num_pictures} pictures")
        try:
            count = self.reader.count(png)
        except ValueError as error:
            raise EpisodeError("bad_picture", str(error)) from error
        expanded: list[int] = []
        pictures: list[Picture] = []
        for token in ids:
            if token == placeholder:
                pictures.append(Picture(len(expanded), count, png))
                expanded += [placeholder] * count
            else:
                expanded.append(token)
        return tuple(expanded), tuple(pictures)
